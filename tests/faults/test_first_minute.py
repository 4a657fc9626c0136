"""A home whose first command ends early: the same command then completes, and nothing is missing.

What is made once at the start of a home (MLflow's and Prefect's databases, the survey of the
machine, Ray's token, records and locks) is placed by what of it is there: the run is ended as soon
as so many bytes of a database, or a file, can be seen. Forty ends beside three busy loops are
`make test-first-minute`; of each database one runs in the slow tier.
"""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_pipeline import Home, settings

from infra.services.stack import down
from infra.waiting import wait_for

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

NUM_LOOPS = int(os.environ.get("NUM_BUSY_LOOPS", "0"))
"""Programs that take what they get of the processor."""
NUM_STAGES = 8
DEADLINE_S = 900.0
POLL_S = 0.002
MLFLOW_BYTES = (1, 60_000, 120_000, 200_000, 280_000, 360_000, 500_000, 650_000, 800_000, 940_000)
PREFECT_BYTES = (1, 4_000, 50_000, 100_000, 200_000, 400_000, 600_000, 800_000, 900_000, 1_000_000)
FILES = (
    *("survey/*.json", "services/prefect-embedded.json", "services/ray.json", "ray_token"),
    *("logs/ray.log", "prefect/memo_store.toml", "tracking/*/pending/*.json", "mlflow.db.lock"),
    *("tracking/*/origin", "mlflow-artifacts/*"),
)
REFUSED = {
    "another Ray": ({"RAY_ADDRESS": "ray://127.0.0.1:10001"},),
    "no Prefect": ({"PREFECT_API_URL": "http://127.0.0.1:9/api"},),
    "a key": ({}, "sft.nope=1"),
    "a model": ({}, "model.init=pretrained", "model.path=/nowhere"),
}
"""Environment and values of the recipe with which the first command is refused."""
SIGNALLED = [
    (number, at) for number in (signal.SIGTERM, signal.SIGINT) for at in (1, 300_000, 900_000)
]
Run = subprocess.Popen[bytes]
Seen = Callable[[Home], bool]
End = Callable[[Home, Run], None]


def one_slow(values: Iterable[Any], number: int) -> list[Any]:
    """Parameters of which one runs in the slow tier too."""
    return [
        pytest.param(value, marks=pytest.mark.slow) if index == number else value
        for index, value in enumerate(values)
    ]


@pytest.fixture(scope="module", autouse=True)
def _busy_machine() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_LOOPS)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stages make, so that a second home has them in seconds."""
    place = tmp_path_factory.mktemp("shared") / "store"
    home = Home(tmp_path_factory.mktemp("maker") / "run", deadline_s=DEADLINE_S)
    home.rlhf("run", *settings(f"location.store={place}"))
    down(home.path)
    return place


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "run", deadline_s=DEADLINE_S)
    yield home
    down(home.path)


def num_bytes(home: Home, pattern: str) -> int:
    """Of a database that is there, or is being made, with what SQLite keeps beside it."""
    total = 0
    for path in home.path.glob(pattern):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def mlflow_has(at: int) -> Seen:
    return lambda home: num_bytes(home, "*mlflow.db*") >= at


def prefect_has(at: int) -> Seen:
    return lambda home: num_bytes(home, "prefect/prefect.db*") >= at


def first_command(home: Home, store: Path, seen: Seen, end: End, *overrides: str) -> None:
    """Begin the run, and end it at a place, which is before its own end."""
    out = home.path.with_name("first")
    with out.open("wb") as file:
        run = subprocess.Popen(
            command(home, store, *overrides), stdout=file, stderr=file, env=home.environment
        )

    def is_there() -> bool:
        assert run.poll() is None, out.read_text()
        return seen(home)

    try:
        wait_for(is_there, "the place", DEADLINE_S, poll_s=POLL_S)
        end(home, run)
        assert run.wait(DEADLINE_S) != 0
    finally:
        run.kill()
        run.wait()


def command(home: Home, store: Path, *overrides: str) -> list[str]:
    return home.command("run", *settings(f"location.store={store}", *overrides))


def kill_run(_: Home, run: Run) -> None:
    run.kill()


def kill_all(home: Home, run: Run) -> None:
    """As a machine that stops: the run, its servers, its jobs."""
    run.kill()
    for process in home.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def completes(home: Home, store: Path, *overrides: str) -> None:
    """The same command again: MLflow holds every stage, and Prefect the run."""
    ended = subprocess.run(
        command(home, store, *overrides),
        capture_output=True,
        text=True,
        env=home.environment,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tracking:" not in ended.stdout + ended.stderr
    stages = [stage["name"] for stage in home.report(ended.stdout)["stages"]]
    with closing(sqlite3.connect(home.path / "mlflow.db")) as database:
        runs = database.execute("SELECT name, status FROM runs WHERE lifecycle_stage = 'active'")
        told = dict(runs.fetchall())
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert {name: told.get(name) for name in stages} == dict.fromkeys(stages, "FINISHED")
    assert len(stages) == NUM_STAGES
    with closing(sqlite3.connect(home.path / "prefect" / "prefect.db")) as database:
        states = database.execute("SELECT state_type FROM flow_run ORDER BY created").fetchall()
    assert states[-1] == ("COMPLETED",)
    assert not list(home.path.glob(".tmp-*"))


@pytest.mark.parametrize("at", one_slow(MLFLOW_BYTES, 3))
def test_fault_row_29_a_run_killed_while_mlflow_makes_its_tables(
    home: Home, store: Path, at: int
) -> None:
    first_command(home, store, mlflow_has(at), kill_run)
    completes(home, store)


@pytest.mark.parametrize("at", one_slow(PREFECT_BYTES, 5))
def test_fault_row_29_run_completes_after_kill_in_prefect_setup(
    home: Home, store: Path, at: int
) -> None:
    first_command(home, store, prefect_has(at), kill_all)
    completes(home, store)


@pytest.mark.parametrize("pattern", FILES)
def test_fault_row_29_a_machine_that_stops_when_a_file_is_there(
    home: Home, store: Path, pattern: str
) -> None:
    """With a last stage of its own, for which Ray starts."""
    last = f"promote.min_value={-1 - FILES.index(pattern)}"
    first_command(home, store, lambda home: any(home.path.glob(pattern)), kill_all, last)
    completes(home, store, last)


@pytest.mark.parametrize("by", REFUSED)
def test_fault_row_29_a_run_that_is_refused(home: Home, store: Path, by: str) -> None:
    environment, *overrides = REFUSED[by]
    last = f"promote.min_value={-101 - list(REFUSED).index(by)}"
    refused = subprocess.run(
        command(home, store, last, *overrides),
        capture_output=True,
        text=True,
        env=home.environment | environment,
        timeout=DEADLINE_S,
    )
    assert refused.returncode != 0, refused.stdout
    completes(home, store, last)


@pytest.mark.parametrize(("number", "at"), SIGNALLED)
def test_fault_row_29_run_completes_after_signal_in_mlflow_setup(
    home: Home, store: Path, number: signal.Signals, at: int
) -> None:
    first_command(home, store, mlflow_has(at), lambda _, run: run.send_signal(number))
    completes(home, store)
