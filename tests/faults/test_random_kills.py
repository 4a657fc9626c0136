"""SIGKILL at random moments over a pipeline of SFT and RL with two ranks, under `rlhf up`.

Hit are the process of the run, the Prefect worker, the job's driver, a rank, the rollout engine and
the MLflow server, whichever was hit least of those that live; gaps are exponential, drawn from a
seed. A run that was ended is started again, as its owner would. One seed has 20 kills; ten more,
with 200 kills, are marked nightly.
"""

import random
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_pipeline import Home, settings

from infra.host import servers
from infra.services.stack import down
from infra.store.storage import open_storage
from infra.tracking.journal import read_journal
from infra.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.exclusive]

NUM_KILLS = 20
"""Of each seed."""
MEAN_GAP_S = 2.0
VICTIM_S = 240.0
"""For the next job to begin: everything may have to start first."""
DEADLINE_S = 600.0 + 60.0 * NUM_KILLS
PIPELINE = settings(
    "training.num_workers=2",
    "rollout.placement=disaggregated",
    f"rollout.max_num_restarts={NUM_KILLS}",
    "rl.num_rounds=1",
    f"sft.num_steps={25 * NUM_KILLS}",
    f"rl.num_steps_per_round={6 * NUM_KILLS}",
    "checkpoint.every_num_steps=5",
    # Rewards of so small a model are all equal, and nothing else would move its weights.
    "rl.algorithm.entropy_coeff=-0.05",
)
VICTIMS = {
    "flow": "flows.commands.cli run",
    "worker": "worker start",
    "driver": "-m engines.jobs.",
    "rank": "ray::RankProcess",
    "rollout": "ray::ReplicaProcess",
    "mlflow": "mlflow server",
}
"""Words in the command line of each."""
MEASURED = ("timing_s/", "perf/", "memory/", "rollout/num_restarts")
"""Beginnings of names whose values are of the machine, or count what was lost."""
Row = tuple[str, int, float]


class Runs:
    """One command, begun as often as it takes."""

    def __init__(self, home: Home, out: Path) -> None:
        self._home, self._out = home, out
        self._process: subprocess.Popen[bytes] | None = None
        self.num_started = 0

    def alive(self) -> bool:
        """Whether the run goes on; it is begun again if it failed."""
        if self._process is not None and self._process.poll() == 0:
            return False
        if self._process is None or self._process.poll() is not None:
            with self._out.open("ab") as out:
                self._process = subprocess.Popen(
                    self._home.command("run", *PIPELINE),
                    stdout=out,
                    stderr=out,
                    env=self._home.environment,
                )
            self.num_started += 1
        return True

    def close(self) -> None:
        """End what is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, dict[str, Any]]:
    """A run that nobody kills, and its report."""
    home = Home(tmp_path_factory.mktemp("kills") / "undisturbed", deadline_s=DEADLINE_S)
    return home, home.report(home.rlhf("run", *PIPELINE))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "killed", deadline_s=DEADLINE_S)
    up(home)
    yield home
    down(home.path)


def up(home: Home) -> None:
    """Start what does not run."""
    argv = [*home.command("up")[:-1]]
    done = subprocess.run(argv, env=home.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def found(home: Home, words: str) -> list[psutil.Process]:
    """Processes of a home with these words in the command line, but for the worker's keeper."""
    keeper = servers.running(home.path, "worker")
    kept = {keeper.process.pid} if keeper and keeper.process else set()
    matching = []
    for process in home.processes():
        try:
            if words in " ".join(process.cmdline()) and process.pid not in kept:
                matching.append(process)
        except psutil.Error:
            continue
    return matching


def rows_of(home: Home, fingerprint: str) -> list[Row]:
    """What a journal holds; of what is measured, only that it was."""
    records, _ = read_journal(open_storage(str(home.path / "store")), fingerprint)
    return sorted(
        (name, record.step, 0.0 if name.startswith(MEASURED) else value)
        for record in records
        if record.step is not None
        for name, value in record.values.items()
    )


def told_of(home: Home, fingerprint: str) -> list[Row]:
    """What MLflow has of a stage, under the names of its journal."""
    names = {name for name, _, _ in rows_of(home, fingerprint)}
    with sqlite3.connect(home.path / "mlflow.db") as database:
        rows = database.execute(
            "SELECT m.key, m.step, m.value FROM metrics m JOIN tags t ON t.run_uuid = m.run_uuid "
            "WHERE t.key = 'rlhf.fingerprint' AND t.value = ?",
            (fingerprint,),
        ).fetchall()
    return sorted(
        (name, step, 0.0 if name.startswith(MEASURED) else value)
        for name, step, value in rows
        if name in names
    )


def differing(one: list[Row], other: list[Row]) -> int:
    """Rows that only one side has, however often."""
    left, right = Counter(one), Counter(other)
    return sum(((left - right) + (right - left)).values())


def kill_at_random(home: Home, runs: Runs, seed: int) -> list[str]:
    """Who was hit, in order."""
    drawn, hit = random.Random(seed), list[str]()

    def works() -> bool:
        # Some kills are left for the time when a rollout engine lives.
        kept = "rollout" not in hit and len(hit) >= NUM_KILLS // 2
        return not runs.alive() or bool(found(home, VICTIMS["rollout" if kept else "driver"]))

    while len(hit) < NUM_KILLS:
        wait_for(works, "a job to begin, or a rollout engine", VICTIM_S, poll_s=0.2)
        time.sleep(drawn.expovariate(1 / MEAN_GAP_S))
        if not runs.alive():
            break
        there = {name: each for name, words in VICTIMS.items() if (each := found(home, words))}
        name = min(sorted(there) or ["flow"], key=lambda each: (hit.count(each), drawn.random()))
        try:
            drawn.choice(there[name]).kill()
        except (KeyError, psutil.NoSuchProcess):
            continue  # it had just ended
        hit.append(name)
        if name == "mlflow":
            up(home)
    return hit


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 11))]
)
def test_fault_row_2_randomly_killed_pipeline_ends_bitwise_equal(
    seed: int,
    home: Home,
    undisturbed: tuple[Home, dict[str, Any]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    quiet, expected = undisturbed
    runs = Runs(home, tmp_path / "out")
    try:
        hit = kill_at_random(home, runs, seed)
        print(Counter(hit), f"{runs.num_started} starts")
        wait_for(lambda: not runs.alive(), "the run to end well", DEADLINE_S, poll_s=1.0)
    finally:
        runs.close()
    up(home)
    report = home.report(home.rlhf("run", *PIPELINE))
    for got, whole in zip(report["stages"], expected["stages"], strict=True):
        assert (got["name"], got["fingerprint"]) == (whole["name"], whole["fingerprint"])
        assert got["digest"] == whole["digest"], got["name"]
        kept = rows_of(home, got["fingerprint"])
        num_altered = differing(kept, rows_of(quiet, got["fingerprint"]))
        num_untold = differing(kept, told_of(home, got["fingerprint"]))
        record_property("F3", num_altered + num_untold)
        assert (num_altered, num_untold) == (0, 0), got["name"]
    assert {*hit} == {*VICTIMS}
    record_property("F2", len(hit))
    assert len(hit) == NUM_KILLS, f"it was done after {len(hit)} kills: {hit}"
