"""Scoring processes: five kinds of misbehaviour leave the other samples alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engines.errors import RewardError
from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.process import ScoringProcess, WorkerSetup
from engines.rewards.scorer import ScoringPool, worth_another
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
        case "two":                         # waits until another process is in it, too
            open(os.path.join(ground_truth, str(os.getpid())), "w").close()
            while len(os.listdir(ground_truth)) < 2: time.sleep(0.01)
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


def score(pool: ScoringPool, requests: Sequence[ScoreRequest]) -> list[Score | Unscored]:
    with closing(pool.batch()) as batch:
        for request in requests:
            batch.add(request)
        return batch.results()


def ask(*solutions: str) -> list[ScoreRequest]:
    return [ScoreRequest("d", solution, "ok", {"index": 1}) for solution in solutions]


def test_fault_row_14_failing_reward_unscores_only_its_sample(file: Path) -> None:
    order = ["ok", *REASONS, "wrong", "ok"]
    pool = make_pool(file)
    results = score(pool, ask(*order))
    pool.close()
    for solution, result in zip(order, results, strict=True):
        if solution in REASONS:
            assert result == Unscored(REASONS[solution])
        else:
            assert result == Score(float(solution == "ok"), {"length": float(len(solution))})


def test_processes_that_die_or_cannot_be_interrupted(file: Path) -> None:
    pool = make_pool(file, num_workers=2)
    results = score(pool, ask("die", "regex", "exit", "child", "ok", "stdin"))
    assert results[0] == Unscored("the scoring process ended with code 3")
    assert results[1] == results[3] == Unscored(REASONS["loop"])
    assert results[2] == Unscored("raised SystemExit: 4")
    assert results[4:] == [Score(1.0, {"length": 2.0}), Score(0.0)]
    pool.close()


def test_the_deadline_is_kept(file: Path) -> None:
    pool = make_pool(file)
    score(pool, ask("ok"))
    started = time.monotonic()
    assert score(pool, ask("loop")) == [Unscored(REASONS["loop"])]
    assert TIMEOUT_S <= time.monotonic() - started < HANG_S
    pool.close()


def test_many_samples_keep_their_order(file: Path) -> None:
    pool = make_pool(file, num_workers=2, bonus=1.0)
    solutions = [str(i) for i in range(60)]
    requests = [ScoreRequest("d", s, s if i % 3 == 0 else "x") for i, s in enumerate(solutions)]
    values = [result.value for result in score(pool, requests) if isinstance(result, Score)]
    assert values == [2.0 if i % 3 == 0 else 1.0 for i in range(60)]
    assert score(pool, []) == []
    pool.close()


def test_texts_larger_than_a_pipe(file: Path) -> None:
    pool = make_pool(file)
    text = "\u4e2d" * 1_000_000
    assert score(pool, [ScoreRequest("d", text, text)]) == [Score(1.0, {"length": 1e6})]
    pool.close()


def test_a_stopped_process_is_replaced(file: Path) -> None:
    pool = make_pool(file)
    (first,) = score(pool, ask("pid"))
    assert isinstance(first, Score)
    os.kill(int(first.value), signal.SIGSTOP)
    assert score(pool, ask("stopped", "ok")) == [
        Unscored(REASONS["loop"]),
        Score(1.0, {"length": 2.0}),
    ]
    pool.close()


def test_an_interrupted_batch_closes_the_pool(file: Path) -> None:
    pool = make_pool(file)
    with pytest.raises(TypeError, match="not JSON serializable"):
        score(pool, [ScoreRequest("d", "ok", object())])
    with pytest.raises(RewardError, match="closed"):
        score(pool, ask("ok"))


def test_async_functions(file: Path) -> None:
    pool = make_pool(file, name="later")
    assert score(pool, ask("now", "sleep")) == [Score(0.5), Unscored(REASONS["loop"])]
    pool.close()


def test_a_function_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    pool = make_pool(tmp_path / "bad.py", num_workers=2)
    with pytest.raises(RewardError, match="cannot be loaded: raised ModuleNotFoundError: No"):
        score(pool, ask("ok"))
    with pytest.raises(RewardError, match="closed"):
        score(pool, ask("ok"))
    pool.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_close_leaves_no_process(file: Path) -> None:
    before = children()
    pool = make_pool(file, num_workers=2)
    assert len(children() - before) == 2
    score(pool, ask("child"))
    pool.close()
    pool.close()
    assert not children() - before


def test_a_dropped_pool_leaves_no_process(file: Path) -> None:
    before = children()
    pool = make_pool(file)
    score(pool, ask("ok"))
    del pool
    assert not children() - before


def test_requests_are_judged_while_others_are_still_to_come(file: Path) -> None:
    pool = make_pool(file)
    batch = pool.batch()
    assert [batch.add(request) for request in ask("ok", "wrong", "none")] == [0, 1, 2]
    wait_for(lambda: len(batch.found) == 3, "three results", PATIENT_S)
    early = dict(batch.found)
    assert batch.add(*ask("ok")) == 3
    assert batch.results() == [
        Score(1.0, {"length": 2.0}),
        Score(0.0, {"length": 5.0}),
        Unscored(REASONS["none"]),
        Score(1.0, {"length": 2.0}),
    ]
    assert early == {number: batch.found[number] for number in range(3)}
    with pytest.raises(RewardError, match="ended"):
        batch.add(*ask("ok"))
    assert score(pool, ask("ok")) == [Score(1.0, {"length": 2.0})]
    pool.close()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "scoring"}


@pytest.mark.parametrize("end", ["batch", "pool"])
def test_abandoned_batch_leaves_no_thread_or_process(file: Path, end: str) -> None:
    before = children()
    pool = make_pool(file, num_workers=2)
    batch = pool.batch()
    for request in ask("sleep", "ok", "regex", "ok"):
        batch.add(request)
    with pytest.raises(RewardError, match="a batch that has not ended"):
        pool.batch()
    assert len(threads()) == 1
    (batch if end == "batch" else pool).close()
    assert not threads()
    assert not children() - before
    for call in (batch.results, lambda: batch.add(*ask("ok"))):
        with pytest.raises(RewardError, match="the batch has ended"):
            call()
    with pytest.raises(RewardError, match="closed"):
        pool.batch()
    batch.close()
    pool.close()


def test_a_batch_without_requests_leaves_the_pool_open(file: Path) -> None:
    pool = make_pool(file)
    pool.batch().close()
    assert score(pool, ask("ok")) == [Score(1.0, {"length": 2.0})]
    pool.close()


def test_a_broken_function_is_told_while_samples_are_handed_over(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    with closing(make_pool(tmp_path / "bad.py")) as pool:
        batch = pool.batch()
        batch.add(*ask("ok"))
        wait_for(lambda: not threads(), "the thread to end", PATIENT_S)
        with pytest.raises(RewardError, match="cannot be loaded: raised ModuleNotFoundError"):
            batch.add(*ask("ok"))


def test_a_further_process_starts_when_samples_wait(file: Path, tmp_path: Path) -> None:
    before = children()
    setup = WorkerSetup(f"{file}:compute_score", {}, PATIENT_S, None)
    with closing(ScoringPool(setup, 3, 1)) as pool:
        assert score(pool, ask("ok")) == [Score(1.0, {"length": 2.0})]
        assert len(children() - before) == 1
        both = [ScoreRequest("d", "two", str(tmp_path))] * 2
        # The first of them ends only if the other one is judged beside it.
        assert score(pool, [*both, *ask("ok")]) == [
            *[Score(0.0, {"length": 3.0})] * 2,
            Score(1.0, {"length": 2.0}),
        ]
        assert 2 <= len(children() - before) <= 3


def test_a_further_process_that_does_not_start_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file lets one process load it; the function itself is slow enough to ask for more."""
    (tmp_path / "once.py").write_text(
        "import os, time\n"
        f"os.mkdir({str(tmp_path / 'taken')!r})\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(float(solution_str))\n"
        "    return 1.0\n",
        encoding="utf-8",
    )
    setup = WorkerSetup(f"{tmp_path / 'once.py'}:compute_score", {}, PATIENT_S, None)
    with closing(ScoringPool(setup, 2, 1)) as pool:
        solutions = ["0", "3", *["0.01"] * 40]
        assert score(pool, ask(*solutions)) == [Score(1.0)] * len(solutions)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("scoring processes: going on with 1; a further one did not start: ")


def test_a_process_that_died_between_two_batches_costs_no_sample(file: Path) -> None:
    before = children()
    with closing(make_pool(file)) as pool:
        assert score(pool, ask("ok")) == [Score(1.0, {"length": 2.0})]
        (process,) = children() - before
        os.kill(process, signal.SIGKILL)
        wait_for(
            lambda: not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie",
            "its end",
            PATIENT_S,
        )
        assert score(pool, ask("ok")) == [Score(1.0, {"length": 2.0})]


@pytest.mark.parametrize(
    ("processes", "num_waiting", "pays"),
    [
        pytest.param([(None, 0, 0.0)], 1000, False, id="one that starts"),
        pytest.param([(1.0, 1, 0.0)], 1000, False, id="one that was asked once"),
        pytest.param([(1.0, 101, 1.0)], 200, False, id="a start takes half as long"),
        pytest.param([(1.0, 101, 1.0)], 201, True, id="less than that"),
        pytest.param([(1.0, 101, 1.0), (None, 0, 0.0)], 201, False, id="another one helps soon"),
        pytest.param([(1.0, 1, 3.0)], 1, True, id="the second one is slow"),
    ],
)
def test_further_processes_start_as_they_pay(
    processes: list[tuple[float | None, int, float]], num_waiting: int, pays: bool
) -> None:
    named: Callable[..., ScoringProcess] = SimpleNamespace  # pyright: ignore[reportAssignmentType]
    made = [named(start_s=start, num_judged=num, timed_s=s) for start, num, s in processes]
    assert worth_another(made, num_waiting) is pays


def busy_s(pids: Sequence[int]) -> float:
    return sum(psutil.Process(pid).cpu_times().user for pid in pids)


@pytest.mark.slow
@pytest.mark.exclusive
def test_no_process_outlives_a_killed_parent(file: Path) -> None:
    program = (
        "import sys\n"
        "from engines.rewards.base import ScoreRequest\n"
        "from engines.rewards.scorer import ScoringPool\n"
        "from engines.rewards.process import WorkerSetup\n"
        f"pool = ScoringPool(WorkerSetup({str(file)!r} + ':compute_score', {{}}, 3.0, None), 2)\n"
        # What they end by themselves comes earlier than this.
        "for process in pool._processes: process._timeout_s = 600.0\n"
        "def score(*texts):\n"
        "    batch = pool.batch()\n"
        "    for text in texts: batch.add(ScoreRequest('d', text, ''))\n"
        "    return batch.results()\n"
        "pids = [int(r.value) for r in score(*['pid'] * 20)]\n"
        "print(*set(pids), flush=True)\n"
        "score('regex')\n"
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
