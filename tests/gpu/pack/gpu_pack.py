"""Pack what a GPU machine without a network lacks: `make gpu-pack`.

Leaves folders `1`, `2`, ... of at most `--part-mb` each, to be carried one by one. Each has a
`run.sh`: it unpacks what the folder holds and then runs the arguments by the Python of the unpacked
project. A stage's archive may be cut into several folders; the last of them unpacks it.

    base       the project with its tests, and what it needs but the servers
    servers    Ray, Prefect and MLflow, for whole pipelines
    vllm       vLLM's job environment, with `--environments vllm`

`--there` is a file with the output of `pip list` or `pip freeze` on that machine. Its packages are
left out, whatever their version; versions that differ from the lock are listed.

There, in the folder that holds them:

    bash 1/run.sh tests/gpu/gpu_check.py
    bash 1/run.sh tests/benchmarks/gpu_bench.py
    bash 2/run.sh tests/gpu/gpu_pipeline.py
"""

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
MB = 10**6
SERVERS = ("asyncpg", "grpcio", "mlflow", "prefect", "ray")
"""Packages that only whole pipelines need. Prefect's server needs asyncpg for SQLite, too."""
PRUNED = (
    "ray/jars/*", "ray/rllib/*", "ray/thirdparty_files/*/test/*", "mlflow/server/js/*",
    "botocore/data/[!_]*/*",
)  # fmt: skip
"""What is never used there. Ray's head needs its dashboard's pages, in `ray/dashboard/client`."""
KEPT = ("botocore/data/s3/*", "botocore/data/sts/*", "botocore/data/sso*/*")
LEFT_OUT = ("docs/images/", "tests/golden/")
"""Of the project."""
GLIBC = (39, 38, 36, 35, 34, 33, 32, 31, 28, 27, 26, 25, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC),
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64",
)  # fmt: skip
WRITE_METADATA = """
import sys
from setuptools import build_meta
build_meta.prepare_metadata_for_build_wheel(sys.argv[1])
"""
PIP_DEADLINE_S = 1800.0
XZ_PRESET = 6


@dataclass(frozen=True)
class Part:
    """What `unpack.py` reads in a folder.

    Attributes:
        index: from 1, of `num_parts` of the stage.
        sha256: of the stage's whole archive.
        environment: job environment to make from the archive; empty: the project's own.
    """

    stage: str
    index: int
    num_parts: int
    sha256: str
    environment: str = ""


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Version by name, of a lock, of `pip freeze`, or of the columns of `pip list`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split("#")[0].strip()
        match = re.match(r"([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?(?:\s*==\s*|\s+)([\w.+!-]+)", words)
        if match and match[1] != "Package":
            found[canonical(match[1])] = match[2]
    return found


def lacking(wanted: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """What is wanted and not there."""
    return {name: version for name, version in wanted.items() if name not in there}


def differing(wanted: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """A line for each package that is there in another version."""
    return [
        f"{name}: {there[name]} is there, the lock has {version}"
        for name, version in wanted.items()
        if name in there and there[name].partition("+")[0] != version.partition("+")[0]
    ]


def fetch(wanted: Mapping[str, str], python: str, directory: Path) -> list[str]:
    """Download wheels for that Python on Linux; returns what has none, by `name==version`."""
    directory.mkdir(exist_ok=True)
    lines = [f"{name}=={version}" for name, version in wanted.items()]
    if not lines or _download(lines, python, directory):
        return []
    return [
        line
        for line in lines
        if not _download([line], python, directory) and not _build(line, directory)
    ]


def _download(lines: Sequence[str], python: str, directory: Path) -> bool:
    options = [word for each in PLATFORMS for word in ("--platform", each)]
    return _pip(
        "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
        "--python-version", python, *options, "--dest", str(directory), *lines,
    )  # fmt: skip


def _build(line: str, directory: Path) -> bool:
    """Of a source distribution; only if it compiles nothing, since this is another Python."""
    with tempfile.TemporaryDirectory() as name:
        if not _pip("wheel", "--no-deps", "--wheel-dir", name, line):
            return False
        wheels = [wheel for wheel in Path(name).glob("*.whl") if wheel.stem.endswith("-none-any")]
        for wheel in wheels:
            shutil.copy(wheel, directory)
        return bool(wheels)


def _pip(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_DEADLINE_S)
    return done.returncode == 0


def name_of(wheel: Path) -> str:
    """The distribution of a wheel's file."""
    return canonical(wheel.name.partition("-")[0])


def unpack_wheel(wheel: Path, site: Path) -> None:
    """Into a directory of packages, without programs and without what is pruned."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = PurePosixPath(entry.filename)
            if path.parts[0].endswith(".data"):
                if len(path.parts) < 3 or path.parts[1] not in {"purelib", "platlib"}:
                    continue
                path = PurePosixPath(*path.parts[2:])
            if entry.is_dir() or is_pruned(path):
                continue
            place = site / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(entry))
            if entry.external_attr >> 16 & 0o111:
                place.chmod(0o755)


def is_pruned(path: PurePosixPath) -> bool:
    """Whether a packaged file stays at home."""
    text = str(path)
    if any(PurePosixPath(text).match(each) or _below(text, each) for each in KEPT):
        return False
    return any(_below(text, each) for each in PRUNED)


def _below(path: str, pattern: str) -> bool:
    """Whether a path or one of its parents matches; `*` is one name."""
    names, words = path.split("/"), pattern.split("/")
    return len(names) >= len(words) and PurePosixPath(*names[: len(words)]).match(pattern)


def copy_project(directory: Path) -> None:
    """The files that git knows or does not ignore, as they are in the work tree, and the commit."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, timeout=60,
    ).stdout.decode().split("\0")  # fmt: skip
    for name in listed:
        source = ROOT / name
        if name and source.is_file() and not name.startswith(LEFT_OUT):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, directory / name)
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    (directory / "COMMIT").write_text(described.stdout)


def write_metadata(project: Path, site: Path) -> None:
    """Entry points and versions of the project, and the name under which its contracts are."""
    subprocess.run(
        [sys.executable, "-c", WRITE_METADATA, str(site)],
        cwd=project, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    for left in project.glob("*.egg-info"):
        shutil.rmtree(left)
    (site / "rlhf").mkdir()
    (site / "rlhf" / "testing").symlink_to("../../project/tests/contracts")


def archive_of(directory: Path, names: Sequence[str], to: Path) -> None:
    """A tar of these folders; equal content gives equal bytes."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
        return None if "__pycache__" in entry.name else entry

    with (
        lzma.open(to, "wb", preset=XZ_PRESET) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name in names:
            for path in sorted([directory / name, *(directory / name).rglob("*")]):
                tar.add(path, str(path.relative_to(directory)), recursive=False, filter=plain)


def cut(
    archive: Path, stage: str, environment: str, out: Path, max_bytes: int, first: int
) -> Iterator[Path]:
    """Folders `first`, `first + 1`, ... with the pieces of an archive and what unpacks them."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    num_parts = max(1, -(-archive.stat().st_size // max_bytes))
    with archive.open("rb") as file:
        for index in range(1, num_parts + 1):
            folder = out / str(first + index - 1)
            folder.mkdir(parents=True)
            (folder / "piece").write_bytes(file.read(max_bytes))
            part = Part(stage, index, num_parts, digest, environment)
            (folder / "part.json").write_text(json.dumps(asdict(part)) + "\n")
            for name in ("run.sh", "unpack.py"):
                shutil.copy(HERE / "there" / name, folder / name)
            yield folder


@dataclass(frozen=True)
class Stage:
    """An archive: folders below the work directory."""

    name: str
    folders: tuple[str, ...]
    environment: str = ""


def stages_in(work: Path, wheels: Path, environments: Sequence[str]) -> Iterator[Stage]:
    """Lay the stages out below `work` and name them."""
    copy_project(work / "project")
    for folder in ("site", "servers/site"):
        (work / folder).mkdir(parents=True)
    write_metadata(work / "project", work / "site")
    for wheel in sorted((wheels / "core").glob("*.whl")):
        unpack_wheel(wheel, work / ("servers/site" if name_of(wheel) in SERVERS else "site"))
    yield Stage("base", ("project", "site"))
    yield Stage("servers", ("servers/site",))
    for name in environments:
        (work / f"site-{name}").mkdir()
        for wheel in sorted((wheels / name).glob("*.whl")):
            unpack_wheel(wheel, work / f"site-{name}")
        yield Stage(name, (f"site-{name}",), name)


def pack(work: Path, stages: Sequence[Stage], out: Path, max_bytes: int) -> list[Path]:
    """Write all parts; returns their folders."""
    folders: list[Path] = []
    for stage in stages:
        archive = work / f"{stage.name}.tar.xz"
        base = work / "servers" if stage.name == "servers" else work
        names = [Path(folder).name for folder in stage.folders]
        archive_of(base, names, archive)
        first = len(folders) + 1
        folders += cut(archive, stage.name, stage.environment, out, max_bytes, first)
    return folders


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--there", type=Path, help="`pip list` of the machine; without: nothing")
    parser.add_argument("--python", default="3.12", help="version of its Python")
    parser.add_argument("--locks", type=Path, default=ROOT / "infra" / "locks" / "cuda")
    parser.add_argument("--environments", nargs="*", default=[], help="job environments")
    parser.add_argument("--wheels", type=Path, help="folders of wheels that are there; fetch none")
    parser.add_argument("--part-mb", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_pack")
    return parser.parse_args()


def main() -> int:
    """Pack and list the parts; 1 if a package has no wheel."""
    chosen = options()
    there = pinned(chosen.there.read_text()) if chosen.there else {}
    core = pinned((chosen.locks / "core.lock").read_text())
    print(*differing(core, there), sep="\n")
    shutil.rmtree(chosen.out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as name:
        work, missing = Path(name), []
        wheels = chosen.wheels or work / "wheels"
        if chosen.wheels is None:
            wheels.mkdir()
            missing = fetch(lacking(core, there), chosen.python, wheels / "core")
            for each in chosen.environments:
                wanted = lacking(pinned((chosen.locks / f"{each}.lock").read_text()), there)
                missing += fetch(lacking(wanted, core), chosen.python, wheels / each)
        stages = [*stages_in(work, wheels, chosen.environments)]
        # What scripts need beside the piece is small.
        max_bytes = int(chosen.part_mb * MB) - 64 * 1024
        folders = pack(work, stages, chosen.out, max_bytes)
    for folder in folders:
        part = json.loads((folder / "part.json").read_text())
        print(f"{folder}: {part['stage']} {part['index']}/{part['num_parts']}, "
              f"{size_of(folder) / MB:.1f} MB")  # fmt: skip
        assert size_of(folder) <= chosen.part_mb * MB
    print(*(f"no wheel: {line}" for line in missing), sep="\n")
    return int(bool(missing))


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
