"""Scoring processes: five kinds of misbehaviour leave the other samples alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from engines.errors import RewardError
from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.pool import ScoringPool
from engines.rewards.process import ScoringProcess, WorkerSetup
from infra.waiting import wait_for

TIMEOUT_S = 1.0
PATIENT_S = 600.0
"""Where no deadline is meant to be missed, even on a busy machine."""
HANG_S = 60.0
LATE = {"loop", "sleep", "regex", "child", "stopped"}
"""Samples that miss theirs."""
REWARD = """
import os, re, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    print("noise on stdout")
    match solution_str:
        case "loop":
            while True: pass
        case "sleep":
            time.sleep(60)
        case "regex":                       # holds the interpreter lock
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "child":
            subprocess.run(["sleep", "60"])
        case "raise":
            raise RuntimeError("boom")
        case "exit":
            sys.exit(4)
        case "die":
            os._exit(3)
        case "nan":
            return float("nan")
        case "none":
            return None
        case "str":
            return "1.0"
        case "stdin":
            return float(len(sys.stdin.read()))
        case "pid":
            return float(os.getpid())
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str)}

async def later(solution_str, **rest):
    import asyncio
    await asyncio.sleep(60 if solution_str == "sleep" else 0)
    return 0.5
"""
REASONS = {
    "loop": f"missed the deadline of {TIMEOUT_S:g} s",
    "raise": "raised RuntimeError: boom",
    "nan": "returned nan",
    "none": "returned None; need a number",
    "str": "returned a str; need a number",
}


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those alone that are meant to miss them."""
    submit = ScoringProcess.submit

    def of_the_sample(process: ScoringProcess, index: int, request: ScoreRequest) -> None:
        process._timeout_s = TIMEOUT_S if request.solution_str in LATE else PATIENT_S
        submit(process, index, request)

    monkeypatch.setattr(ScoringProcess, "submit", of_the_sample)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD, encoding="utf-8")
    return path


def make_pool(
    file: Path, num_workers: int = 1, name: str = "compute_score", **kwargs: float
) -> ScoringPool:
    setup = WorkerSetup(f"{file}:{name}", kwargs, PATIENT_S, None)
    return ScoringPool(setup, num_workers)


def ask(*solutions: str) -> list[ScoreRequest]:
    return [ScoreRequest("d", solution, "ok", {"index": 1}) for solution in solutions]


def test_fault_row_14_misbehaviour_is_unscored_and_spares_the_others(file: Path) -> None:
    order = ["ok", *REASONS, "wrong", "ok"]
    pool = make_pool(file)
    results = pool.score(ask(*order))
    pool.close()
    for solution, result in zip(order, results, strict=True):
        if solution in REASONS:
            assert result == Unscored(REASONS[solution])
        else:
            assert result == Score(float(solution == "ok"), {"length": float(len(solution))})


def test_processes_that_die_or_cannot_be_interrupted(file: Path) -> None:
    pool = make_pool(file, num_workers=2)
    results = pool.score(ask("die", "regex", "exit", "child", "ok", "stdin"))
    assert results[0] == Unscored("the scoring process ended with code 3")
    assert results[1] == results[3] == Unscored(REASONS["loop"])
    assert results[2] == Unscored("raised SystemExit: 4")
    assert results[4:] == [Score(1.0, {"length": 2.0}), Score(0.0)]
    pool.close()


def test_the_deadline_is_kept(file: Path) -> None:
    pool = make_pool(file)
    pool.score(ask("ok"))
    started = time.monotonic()
    assert pool.score(ask("loop")) == [Unscored(REASONS["loop"])]
    assert TIMEOUT_S <= time.monotonic() - started < HANG_S
    pool.close()


def test_many_samples_keep_their_order(file: Path) -> None:
    pool = make_pool(file, num_workers=2, bonus=1.0)
    solutions = [str(i) for i in range(60)]
    requests = [ScoreRequest("d", s, s if i % 3 == 0 else "x") for i, s in enumerate(solutions)]
    values = [result.value for result in pool.score(requests) if isinstance(result, Score)]
    assert values == [2.0 if i % 3 == 0 else 1.0 for i in range(60)]
    assert pool.score([]) == []
    pool.close()


def test_texts_larger_than_a_pipe(file: Path) -> None:
    pool = make_pool(file)
    text = "\u4e2d" * 1_000_000
    assert pool.score([ScoreRequest("d", text, text)]) == [Score(1.0, {"length": 1e6})]
    pool.close()


def test_a_stopped_process_is_replaced(file: Path) -> None:
    pool = make_pool(file)
    (first,) = pool.score(ask("pid"))
    assert isinstance(first, Score)
    os.kill(int(first.value), signal.SIGSTOP)
    assert pool.score(ask("stopped", "ok")) == [
        Unscored(REASONS["loop"]),
        Score(1.0, {"length": 2.0}),
    ]
    pool.close()


def test_an_interrupted_batch_closes_the_pool(file: Path) -> None:
    pool = make_pool(file)
    with pytest.raises(TypeError, match="not JSON serializable"):
        pool.score([ScoreRequest("d", "ok", object())])
    with pytest.raises(RewardError, match="closed"):
        pool.score(ask("ok"))


def test_async_functions(file: Path) -> None:
    pool = make_pool(file, name="later")
    assert pool.score(ask("now", "sleep")) == [Score(0.5), Unscored(REASONS["loop"])]
    pool.close()


def test_a_function_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    pool = make_pool(tmp_path / "bad.py", num_workers=2)
    with pytest.raises(RewardError, match="cannot be loaded: raised ModuleNotFoundError: No"):
        pool.score(ask("ok"))
    with pytest.raises(RewardError, match="closed"):
        pool.score(ask("ok"))
    pool.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_close_leaves_no_process(file: Path) -> None:
    before = children()
    pool = make_pool(file, num_workers=2)
    assert len(children() - before) == 2
    pool.score(ask("child"))
    pool.close()
    pool.close()
    assert not children() - before


def test_a_dropped_pool_leaves_no_process(file: Path) -> None:
    before = children()
    pool = make_pool(file)
    pool.score(ask("ok"))
    del pool
    assert not children() - before


def busy_s(pids: Sequence[int]) -> float:
    return sum(psutil.Process(pid).cpu_times().user for pid in pids)


@pytest.mark.slow
@pytest.mark.exclusive
def test_no_process_outlives_a_killed_parent(file: Path) -> None:
    program = (
        "import sys\n"
        "from engines.rewards.base import ScoreRequest\n"
        "from engines.rewards.pool import ScoringPool\n"
        "from engines.rewards.process import WorkerSetup\n"
        f"pool = ScoringPool(WorkerSetup({str(file)!r} + ':compute_score', {{}}, 3.0, None), 2)\n"
        # What they end by themselves comes earlier than this.
        "for process in pool._processes: process._timeout_s = 600.0\n"
        "pids = [int(r.value) for r in pool.score([ScoreRequest('d', 'pid', '')] * 20)]\n"
        "print(*set(pids), flush=True)\n"
        "pool.score([ScoreRequest('d', 'regex', '')])\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        before_s = busy_s(pids)
        inside = "a process to be inside the regular expression"
        wait_for(lambda: busy_s(pids) >= before_s + 0.2, inside, HANG_S)
        parent.kill()
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), f"{pids} to be gone", HANG_S)
