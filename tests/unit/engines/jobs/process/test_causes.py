"""Causes of failed jobs in words, each from the error that really comes."""

import errno
from pathlib import Path

import pytest
import torch

from engines.errors import NonFiniteError, WorkerError
from engines.jobs.process.runtime import job_problem
from engines.trainers.step_timer import PhaseClock
from infra import waiting
from infra.errors import ConfigError, DeadlineError
from infra.store.work_channel import Cause, JobProblem
from infra.waiting import when_there_is_room

FULL = OSError(errno.ENOSPC, "No space left on device", "/store/work/a")


def raised(error: Exception) -> Exception:
    """An error that was raised in a phase of a clock."""
    with pytest.raises(type(error)) as caught, PhaseClock()("gen"):
        raise error
    return caught.value


def test_memory_that_cannot_be_had_is_told_with_phase_and_peak() -> None:
    with pytest.raises(RuntimeError) as caught, PhaseClock()("update_actor"):
        torch.empty(2**50)
    problem = job_problem(caught.value, 1)
    assert (problem.cause, problem.phase) == ("out_of_memory", "update_actor")
    assert problem.message.startswith("out of memory in phase update_actor: ")
    assert "you tried to allocate 4503599627370496 bytes" in problem.message
    peak = int(problem.message.partition("this process held ")[2].split()[0].replace(",", ""))
    assert 10**8 < peak < 10**11
    with pytest.raises(MemoryError) as plain:
        bytearray(2**50)
    assert job_problem(plain.value, 1).message.startswith("out of memory: MemoryError; at its peak")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (WorkerError("rank 1 of 2 failed in train: OutOfMemoryError: CUDA out of memory"),
         "out_of_memory"),
        (WorkerError("rank 1 of 2 failed in train: its process died\n  rank 1 | x"), "dead_rank"),
        (WorkerError("rank 0 of 2 failed in train: no heartbeat for 60 s"), "hang"),
        (DeadlineError("train on rank 0, 1\n  rank 0 | x", 60.0), "hang"),
        (DeadlineError("the Ray cluster to start", 60.0), ""),
        (NonFiniteError("policy: loss is nan"), "non_finite"),
        (FULL, "disk_full"),
        (OSError(errno.EIO, "I/O error", "/store/work/a"), ""),
        (ConfigError("a.b", "got 1"), ""),
    ],
)  # fmt: skip
def test_causes_are_told_apart(error: Exception, cause: Cause) -> None:
    problem = job_problem(raised(error), 1)
    assert (problem.cause, problem.phase) == (cause, "gen")
    assert str(error) in problem.message
    assert (problem.message == str(error)) == (cause not in {"disk_full", "out_of_memory"})
    assert JobProblem.model_validate_json(problem.model_dump_json()) == problem


def test_a_disk_that_stays_full_says_how_much_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ROOM_DEADLINE_S", 0.0)

    def write() -> None:
        raise OSError(errno.ENOSPC, "5 bytes are free, the newest has 7")

    with pytest.raises(DeadlineError) as caught:
        when_there_is_room(write, "a place")
    problem = job_problem(caught.value, 1)
    assert problem.cause == "disk_full"
    assert "room on the disk of a place (5 bytes are free, the newest has 7)" in problem.message
    assert problem.message.endswith("free space there, then run again to resume")
    named = job_problem(OSError(errno.ENOSPC, "No space left", str(tmp_path / "file")), 1)
    assert f"bytes are free at {tmp_path};" in named.message


def test_the_innermost_phase_counts() -> None:
    with pytest.raises(NonFiniteError) as caught, PhaseClock()("train"), PhaseClock()("gen"):
        raise NonFiniteError("x")
    assert job_problem(caught.value, 1).phase == "gen"
    assert job_problem(NonFiniteError("x"), 1).phase == ""
