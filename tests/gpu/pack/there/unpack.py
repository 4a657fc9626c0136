"""Unpack a part of `gpu_pack.py` on the machine that it was carried to: `unpack.py PART HOME`.

Needs nothing but Python. The environments that it makes see the packages that were carried, then
the project, then every package of the interpreter that runs this.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PROGRAM = """#!{python}
import sys
from flows.commands.cli import main
sys.exit(main())
"""


def unpack(part: Path, home: Path) -> None:
    """Keep this piece; if it is the last of its archive, unpack that and make its environment."""
    facts = json.loads((part / "part.json").read_text())
    pieces = home / "pieces" / facts["stage"]
    pieces.mkdir(parents=True, exist_ok=True)
    done = home / f"{facts['stage']}.unpacked"
    if done.exists() and done.read_text() == facts["sha256"]:
        return
    shutil.copy(part / "piece", pieces / str(facts["index"]))
    found = [pieces / str(number + 1) for number in range(facts["num_parts"])]
    if absent := [path.name for path in found if not path.exists()]:
        print(f"{facts['stage']}: piece {facts['index']} kept; {', '.join(absent)} to come")
        return
    archive = home / f"{facts['stage']}.tar.xz"
    digest = hashlib.sha256()
    with archive.open("wb") as whole:
        for path in found:
            data = path.read_bytes()
            digest.update(data)
            whole.write(data)
    if digest.hexdigest() != facts["sha256"]:
        sys.exit(f"{facts['stage']}: the pieces are not those of one archive; carry them again")
    with tarfile.open(archive) as tar:
        tar.extractall(home, filter="fully_trusted")
    archive.unlink()
    shutil.rmtree(pieces)
    project, name = home / "project", facts["environment"]
    if name:
        make_environment(project / ".envs" / name, [home / f"site-{name}", home / "site", project])
    elif not (project / ".venv").exists():
        make_environment(project / ".venv", [home / "site", project])
    done.write_text(facts["sha256"])


def make_environment(directory: Path, first: "list[Path]") -> None:
    """A virtual environment with these directories, then what this interpreter sees."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    # The interpreter may be a virtual environment's: then its packages are not the system's.
    own = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    for packages in directory.glob("lib/python*/site-packages"):
        (packages / "carried.pth").write_text("\n".join([*map(str, first), *own]) + "\n")
    program = directory / "bin" / "rlhf"
    program.write_text(PROGRAM.format(python=directory / "bin" / "python"))
    program.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
