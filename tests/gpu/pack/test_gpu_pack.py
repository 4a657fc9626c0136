"""The pack for a GPU machine without a network: packed, carried, unpacked and run, on a CPU."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import gpu_pack
import pytest

HERE = Path(__file__).resolve().parent
DEADLINE_S = 600.0


def write_wheel(directory: Path, name: str, files: dict[str, str]) -> Path:
    """A wheel for every Python with these files and its metadata."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-1.0-py3-none-any.whl"
    metadata = {
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    }
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**files, **metadata}.items():
            archive.writestr(each, text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "# a lock\nTorch==2.13.0  # why\nray[default]==2.60.1\nfoo.bar_baz==1.0\n",
        "Package    Version\n---------- -------\ntorch 2.13.0\nray 2.60.1\nFoo-Bar-Baz 1.0\n",
    ],
)
def test_locks_and_lists_of_pip_are_read(text: str) -> None:
    assert gpu_pack.pinned(text) == {"torch": "2.13.0", "ray": "2.60.1", "foo-bar-baz": "1.0"}


def test_what_is_there_is_left_out_and_its_version_told() -> None:
    wanted = {"torch": "2.13.0", "ray": "2.60.1", "numpy": "2.5.1"}
    there = {"torch": "2.11.0+cu130", "numpy": "2.5.1"}
    assert gpu_pack.lacking(wanted, there) == {"ray": "2.60.1"}
    assert gpu_pack.differing(wanted, there) == [
        "torch: 2.11.0+cu130 is there, the lock has 2.13.0"
    ]
    assert gpu_pack.differing({"torch": "2.11.0"}, there) == [], "a build of the same version"


@pytest.mark.parametrize(
    ("path", "pruned"),
    [
        ("ray/jars/ray_dist.jar", True),
        ("ray/dashboard/client/build/index.html", False),
        ("infra/ray/jars.py", False),
        ("mlflow/server/js/build/static/app.js", True),
        ("botocore/data/ec2/2016/service.json", True),
        ("botocore/data/s3/2006/service.json", False),
        ("botocore/data/endpoints.json", False),
    ],
)
def test_only_what_is_never_used_is_pruned(path: str, pruned: bool) -> None:
    assert gpu_pack.is_pruned(PurePosixPath(path)) is pruned


def test_a_wheel_becomes_packages_without_programs(tmp_path: Path) -> None:
    wheel = write_wheel(
        tmp_path, "greeting",
        {"greeting/__init__.py": "", "greeting-1.0.data/purelib/extra.py": "",
         "greeting-1.0.data/scripts/greet": ""},
    )  # fmt: skip
    gpu_pack.unpack_wheel(wheel, tmp_path / "site")
    found = {str(each.relative_to(tmp_path / "site")) for each in (tmp_path / "site").rglob("*.py")}
    assert found == {"greeting/__init__.py", "extra.py"}
    assert not [*(tmp_path / "site").rglob("greet")]
    assert gpu_pack.name_of(wheel) == "greeting"


def packed(tmp_path: Path, part_mb: float) -> list[Path]:
    """Pack the project with one tiny package, by the command."""
    write_wheel(tmp_path / "wheels" / "core", "greeting", {"greeting.py": "WORD = 'hello'\n"})
    write_wheel(tmp_path / "wheels" / "core", "mlflow", {"only_servers_have_this.py": ""})
    ended = subprocess.run(
        [sys.executable, str(HERE / "gpu_pack.py"), "--wheels", str(tmp_path / "wheels"),
         "--out", str(tmp_path / "parts"), "--part-mb", str(part_mb)],
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folders = sorted((tmp_path / "parts").iterdir(), key=lambda each: int(each.name))
    assert all(gpu_pack.size_of(folder) <= part_mb * 1e6 for folder in folders)
    assert len(re.findall(r" MB$", ended.stdout, re.MULTILINE)) == len(folders)
    return folders


def ran(folder: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a part's `run.sh` does there."""
    return subprocess.run(
        ["bash", str(folder / "run.sh"), *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S,
        env={"RLHF_GPU_HOME": str(home), "PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_packed_runs_where_it_is_unpacked(tmp_path: Path) -> None:
    """In two pieces, carried one by one; the project that runs is the unpacked one."""
    folders, home = packed(tmp_path, part_mb=0.9), tmp_path / "there"
    stages = [json.loads((folder / "part.json").read_text())["stage"] for folder in folders]
    assert stages == [*["base"] * (len(folders) - 1), "servers"]
    assert len(folders) > 2
    kept = ran(folders[0], home)
    assert "to come" in kept.stdout
    assert not (home / "project").exists()
    for folder in folders[1:-1]:
        assert ran(folder, home).returncode == 0
    where = (
        "import engines, greeting, rlhf.testing.rollout_calls as calls; from importlib import "
        "metadata; print(engines.__file__, calls.__file__, greeting.WORD, "
        "metadata.version('rlhf-pipeline'), bool(metadata.entry_points(group='pytest11')))"
    )
    told = ran(folders[-2], home, "-c", where)
    assert told.returncode == 0, told.stderr
    ours, contracts, word, version, has_entry_points = told.stdout.split()
    assert Path(ours).is_relative_to(home / "project")
    assert Path(contracts).is_relative_to(home)
    assert (word, version, has_entry_points) == ("hello", "0.1.0", "True")
    assert not (home / "site" / "only_servers_have_this.py").exists()
    assert ran(folders[-1], home).returncode == 0
    assert (home / "site" / "only_servers_have_this.py").exists()
    bench = ran(
        folders[-1], home, "tests/benchmarks/gpu_bench.py", "--device", "cpu", "--tiny",
        "--only", "checksum", "--limit-s", "500",
    )  # fmt: skip
    assert bench.returncode == 0, bench.stdout + bench.stderr
    stack, figure = (home / "project" / "build" / "gpu_bench.jsonl").read_text().splitlines()
    assert json.loads(stack)["stack"]["commit"] == (home / "project" / "COMMIT").read_text().strip()
    assert json.loads(figure)["value"] > 0


def test_pieces_of_two_archives_are_refused(tmp_path: Path) -> None:
    archive, home = tmp_path / "base.tar.xz", tmp_path / "there"
    archive.write_bytes(bytes(range(256)) * 10)
    folders = [*gpu_pack.cut(archive, "base", "", tmp_path / "parts", 1000, 1)]
    assert [(folder / "piece").stat().st_size for folder in folders] == [1000, 1000, 560]
    (folders[1] / "piece").write_bytes(b"another")
    ended = [ran(folder, home) for folder in folders]
    assert [each.returncode for each in ended] == [0, 0, 1]
    assert "carry them again" in ended[-1].stderr
    assert not (home / "project").exists()
