"""The commit protocol of step checkpoints: whole or absent, newest valid wins."""

import errno
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from engines.checkpoint.step_store import StepCheckpoints, TrainerState
from engines.errors import CheckpointError
from infra import faults, waiting
from infra.errors import DeadlineError
from infra.faults import InjectedFaultError


def write(content: str):  # noqa: ANN201
    def files(path: Path) -> None:
        (path / "tensors").mkdir()
        (path / "tensors" / "weights").write_text(content)

    return files


def saved(root: Path, *steps: int, keep: int = 2) -> StepCheckpoints:
    store = StepCheckpoints(root, keep)
    for step in steps:
        store.save(step, write(f"weights of {step}"), TrainerState(step, {"kl_coef": 0.5}))
    return store


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_found_with_its_state(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "checkpoints"
    assert StepCheckpoints(root, 2).latest_valid() is None
    newest = saved(root, 5, 10).latest_valid()
    assert newest is not None
    assert newest.step == 10
    assert newest.state == TrainerState(10, {"kl_coef": 0.5})
    assert newest.path == root / "step-00000010" / "checkpoint"
    assert (newest.path / "tensors" / "weights").read_text() == "weights of 10"


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4, keep=3)
    assert store.steps() == [2, 3, 4]
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    with pytest.raises(ValueError, match="keep at least two"):
        StepCheckpoints(tmp_path, 1)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "extra"])
def test_a_damaged_one_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved(tmp_path, 5, 10)
    newest = tmp_path / "step-00000010"
    file = newest / "checkpoint" / "tensors" / "weights"
    match damage:
        case "flip":
            file.write_bytes(b"X" + file.read_bytes()[1:])
        case "truncate":
            file.write_bytes(file.read_bytes()[:-1])
        case "remove":
            file.unlink()
        case "manifest":
            (newest / "manifest.json").unlink()
        case "extra":
            (newest / "stray").touch()
    found = store.latest_valid()
    assert found is not None
    assert found.step == 5
    assert "skipping the checkpoint of step 10" in caplog.text
    with pytest.raises(CheckpointError, match=r"^step 10: .*; other steps: 5"):
        store.load(10)


def test_a_step_asked_for_is_never_replaced(tmp_path: Path) -> None:
    store = saved(tmp_path, 5, 10)
    assert store.load(5).step == 5
    with pytest.raises(
        CheckpointError, match=r"step 7: .* has no manifest.json; other steps: 5, 10"
    ):
        store.load(7)


def test_bad_input_row_35_all_damaged_is_an_error_not_a_restart(
    tmp_path: Path,
) -> None:
    store = saved(tmp_path, 5, 10)
    for step in (5, 10):
        (tmp_path / f"step-{step:08d}" / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no valid step"):
        store.latest_valid()


def test_a_read_error_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved(tmp_path, 5, 10)

    def fails(directory: Path, kind: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("infra.store.step_directories.verify_directory", fails)
    with pytest.raises(OSError, match="Input/output"):
        store.latest_valid()


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    store = saved(tmp_path, 5)

    def fails(path: Path) -> None:
        (path / "half").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.save(10, fails, TrainerState(10))
    assert names(tmp_path) == ["step-00000005"]


def test_saving_a_step_again(tmp_path: Path) -> None:
    store = saved(tmp_path, 5, 10)
    before = (tmp_path / "step-00000010").stat().st_ino
    saved(tmp_path, 10)
    assert (tmp_path / "step-00000010").stat().st_ino == before, "equal content stays untouched"
    (tmp_path / "step-00000010" / "checkpoint" / "tensors" / "weights").write_text("damaged")
    saved(tmp_path, 10)
    assert store.load(10).step == 10
    store.save(10, write("other"), TrainerState(10))
    assert (store.load(10).path / "tensors" / "weights").read_text() == "other"


def test_a_step_is_there_until_its_replacement_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(tmp_path, 5)
    monkeypatch.setattr(faults, "_passes", Counter())
    monkeypatch.setenv("RLHF_FAULTS", "atomic.before_publish=raise")
    with pytest.raises(InjectedFaultError):
        store.save(5, write("other"), TrainerState(5))
    assert (store.load(5).path / "tensors" / "weights").read_text() == "weights of 5"
    monkeypatch.delenv("RLHF_FAULTS")
    store.save(5, write("other"), TrainerState(5))
    assert (store.load(5).path / "tensors" / "weights").read_text() == "other"
    assert len(names(tmp_path)) == 1


def test_the_state_must_be_of_that_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the trainer is at step 3"):
        StepCheckpoints(tmp_path, 2).save(4, write(""), TrainerState(3))


@pytest.mark.parametrize(
    "point", ["artifacts.before_manifest", "atomic.before_publish", "atomic.after_publish"]
)
def test_killed_in_the_middle_of_a_save(tmp_path: Path, point: str) -> None:
    saved(tmp_path, 5)
    program = (
        "import sys; from pathlib import Path\n"
        "from engines.checkpoint.step_store import StepCheckpoints, TrainerState\n"
        "StepCheckpoints(Path(sys.argv[1]), 2).save(\n"
        "    10, lambda path: (path / 'w').write_text('x'), TrainerState(10))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={"RLHF_FAULTS": f"{point}=kill", "PATH": "/usr/bin:/bin"},
        timeout=60,
        check=False,
    )
    assert done.returncode == -9
    newest = StepCheckpoints(tmp_path, 2).latest_valid()
    assert newest is not None
    assert newest.step == (10 if point == "atomic.after_publish" else 5)
    assert saved(tmp_path, 10).steps() == [5, 10]


def test_a_fault_that_raises_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_FAULTS", "atomic.before_publish=raise")
    with pytest.raises(InjectedFaultError):
        saved(tmp_path, 5)
    assert names(tmp_path) == []


def test_fault_row_7_save_waits_for_room_the_size_of_the_newest(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "ROOM_POLL_S", 0.05)
    store = saved(small_disk / "steps", 1)
    store.save(2, write("w" * 600_000), TrainerState(2))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_000_000))
    threading.Timer(0.3, filler.unlink).start()
    store.save(3, write("v" * 600_000), TrainerState(3))
    assert store.steps() == [2, 3]
    assert "bytes are free, the newest checkpoint has 60" in caplog.text
    monkeypatch.setattr(waiting, "ROOM_DEADLINE_S", 0.1)
    filler.write_bytes(bytes(600_000))
    with pytest.raises(DeadlineError, match=f"room on the disk of {small_disk}"):
        store.save(4, write("u" * 600_000), TrainerState(4))
    assert store.steps() == [2, 3]


def test_disk_filling_during_a_save_reports_the_needed_bytes(small_disk: Path) -> None:
    """What the engine writes is more than the newest had, or nobody knew how much it is."""
    store = StepCheckpoints(small_disk / "steps", 2)
    with pytest.raises(
        OSError, match="a checkpoint needs more than \\d+ bytes, \\d+ were free"
    ) as caught:
        store.save(1, write("w" * 4_000_000), TrainerState(1))
    assert caught.value.errno == errno.ENOSPC
    assert store.steps() == []
    assert names(small_disk / "steps") == []
