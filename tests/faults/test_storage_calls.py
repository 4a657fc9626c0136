"""Every storage system call of a save and of a publish: the last one, or failing.

Rows 1, 7, 8 and 10 of the fault matrix. The children are watched by the kernel, so that no call of
any thread or library is left out; each program says how many there were.
"""

import errno
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage_calls import Call, UnsupportedError
from sync_order import not_durable

from infra import env

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEADLINE_S = 600.0


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where fsync costs nothing: no kill here tests a power loss."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as directory:
        yield Path(directory)


def figures(program: str, *arguments: object) -> dict[str, Any]:
    """What a program prints at its end; a skip where its children cannot be watched."""
    done = subprocess.run(
        [sys.executable, str(HERE / program), *map(str, arguments)],
        env=env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    unsupported = re.search(rf"{UnsupportedError.__name__}: (.*)", done.stderr)
    if unsupported:
        pytest.skip(unsupported[1])
    assert done.returncode == 0, done.stderr
    print(program, *arguments[-2:], done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "background"])
def test_fault_row_1_kill_at_any_save_call_resumes_bitwise_equal(
    memory: Path, how: str, record_property: Callable[[str, object], None]
) -> None:
    found = figures("save_driver.py", memory, "kill", how)
    record_property("F1", found["points"])
    assert found["points"] >= 70
    assert found["newest"] == [2, 3, 4], "before, between and after the two saves"


@pytest.mark.parametrize(
    "origin", ["same disk", pytest.param("other disk", marks=pytest.mark.slow)]
)
def test_fault_row_1_kill_at_any_publish_call_is_recoverable(
    memory: Path, tmp_path: Path, origin: str, record_property: Callable[[str, object], None]
) -> None:
    if origin == "other disk" and memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm on another file system than the temporary directory")
    source = memory if origin == "same disk" else tmp_path
    found = figures("publish_driver.py", memory, source, "kill")
    record_property("F1", found["points"])
    assert found["points"] >= 35
    assert found["states"] == ["committed", "nothing", "published"]


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_fault_row_7_and_8_disk_error_in_save_publishes_nothing(memory: Path, error: int) -> None:
    found = figures("save_driver.py", memory, "fail", error)
    assert found["points"] >= 35
    assert found["swallowed"] == [], "the caller is told of every one"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_fault_row_7_and_8_disk_error_in_publish_commits_nothing(memory: Path, error: int) -> None:
    found = figures("publish_driver.py", memory, memory, "fail", error)
    assert found["points"] >= 35
    assert found["swallowed"] == [], "the caller is told of every one"


@pytest.mark.slow
def test_fault_row_8_checkpoint_read_error_not_absence_or_damage(
    memory: Path,
) -> None:
    assert figures("save_driver.py", memory, "read", errno.EIO)["points"] >= 60


def test_fault_row_8_artifact_read_error_not_absence_or_damage(
    memory: Path,
) -> None:
    assert figures("publish_driver.py", memory, memory, "read", errno.EIO)["points"] >= 40


def call(name: str, *paths: str) -> Call:
    return Call(name, paths, changes=True)


def test_what_a_power_loss_could_take_is_read_from_the_calls() -> None:
    """By hand: a good order, and each of its syncs left out."""
    calls = [
        call("mkdir", "/s/.tmp"),
        call("openat", "/s/.tmp/f"),
        call("write", "/s/.tmp/f"),
        call("fsync", "/s/.tmp/f"),
        call("fsync", "/s/.tmp"),
        call("rename", "/s/.tmp", "/s/step"),
        call("fsync", "/s"),
    ]

    def lost(left_out: int | None = None) -> list[str]:
        kept = [c for i, c in enumerate(calls) if i != left_out]
        return not_durable(kept, lambda path: path == "/s/step")

    assert lost() == []
    assert [lost(i) for i in (3, 4, 6)] == [["/s/.tmp/f"], ["/s/.tmp"], ["/s"]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "background"])
def test_fault_row_10_a_step_is_durable_before_it_has_its_name(memory: Path, how: str) -> None:
    found = figures("save_driver.py", memory, "order", how)
    assert found == {"named": ["step-00000003", "step-00000004"], "not_durable": []}


@pytest.mark.parametrize(
    "origin", ["same disk", pytest.param("other disk", marks=pytest.mark.slow)]
)
def test_fault_row_10_artifact_is_durable_before_it_is_named(
    memory: Path, tmp_path: Path, origin: str
) -> None:
    source = memory if origin == "same disk" else tmp_path
    found = figures("publish_driver.py", memory, source, "order")
    assert found["named"] >= 3, "the artifact and two entries of its log"
    assert found["not_durable"] == []
