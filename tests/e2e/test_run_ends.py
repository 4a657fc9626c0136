"""However `rlhf run` ends, nothing of it stays that nobody asked for; real Ray and Prefect."""

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_pipeline import Home, settings

from infra.host import servers
from infra.ray import cluster as ray_cluster
from infra.ray.cluster import ensure_cluster
from infra.services.stack import down, status
from infra.waiting import wait_for

pytestmark = pytest.mark.stacks  # those that are slow as well run in .ci/run, too

LONG = settings("sft.num_steps=100000", "checkpoint.every_num_steps=1000")
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
DEADLINE_S = 240.0


_runs: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test() -> Iterator[None]:
    yield
    while _runs:
        run = _runs.pop()
        run.kill()
        run.wait()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "run")
    yield home
    down(home.path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose runs train at once: they share their data, which the first of them makes."""
    home = Home(tmp_path_factory.mktemp("prepared") / "run")
    yield home
    down(home.path)


def _begin(home: Home, out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        run = subprocess.Popen(
            home.command("run", *arguments), stdout=file, stderr=file, env=home.environment
        )
    _runs.append(run)
    return run


def _wait_for_line(out: Path, line: str, run: subprocess.Popen[bytes]) -> None:
    def is_there() -> bool:
        assert run.poll() is None, out.read_text()
        return line in out.read_text()

    wait_for(is_there, line, DEADLINE_S)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("nothing", signal.SIGTERM),
        ("nothing", signal.SIGINT),
        ("prefect-embedded", signal.SIGTERM),
        ("prefect-embedded", signal.SIGINT),
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.slow),
        ("ray", signal.SIGINT),
    ],
)
def test_fault_row_20_a_signal_during_the_start_leaves_nothing(
    home: Home, tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    run = _begin(home, tmp_path / "out")
    if moment == "nothing":
        wait_for(lambda: " in /" in (tmp_path / "out").read_text(), "its first line", DEADLINE_S)
    else:
        record = servers.record_path(home.path, moment)
        wait_for(record.exists, f"the start of {moment}", DEADLINE_S)
    run.send_signal(number)
    time.sleep(0.5)
    run.send_signal(number)  # impatience must not skip the end
    assert run.wait(timeout=DEADLINE_S) == EXIT_CODES[number]
    assert home.processes() == []
    assert servers.recorded(home.path) == []


def test_a_killed_run_is_listed_and_ended_and_its_history_healed(
    prepared: Home, tmp_path: Path
) -> None:
    home = prepared
    run = _begin(home, tmp_path / "out", *LONG)
    _wait_for_line(tmp_path / "out", "sft  step 3/", run)
    run.kill()
    run.wait(timeout=60)
    assert _flow_run_states(home)[-1] == "RUNNING"
    listed = {server.name: server.state for server in status(home.path)}
    assert listed["ray"] == "up"
    assert "prefect-embedded" in listed
    # The Prefect server has nothing to do without its run; the head has a job.
    wait_for(
        lambda: servers.load(home.path, "prefect-embedded") is None, "Prefect's end", DEADLINE_S
    )
    assert servers.running(home.path, "ray") is not None
    assert "ray" in down(home.path)[0]
    assert home.processes() == []
    # The next run says what became of it.
    run = _begin(home, tmp_path / "next", *LONG)
    _wait_for_line(tmp_path / "next", "preprocess  reused", run)
    run.terminate()
    assert run.wait(timeout=DEADLINE_S) == 143
    assert _flow_run_states(home)[-2] == "CRASHED"


@pytest.mark.slow
def test_terminated_run_leaves_its_job_and_head_ends_after_it(
    prepared: Home, tmp_path: Path
) -> None:
    home = prepared
    # Training records its tenth step only when the run has long ended.
    home.environment["RLHF_FAULTS"] = "journal.before_write=sleep:12@10"
    try:
        run = _begin(home, tmp_path / "out", *settings("sft.num_steps=12"))
    finally:
        del home.environment["RLHF_FAULTS"]
    _wait_for_line(tmp_path / "out", "sft  step 3/", run)
    run.terminate()
    assert run.wait(timeout=DEADLINE_S) == 143
    printed = (tmp_path / "out").read_text()
    assert "goes on; its Ray head ends after it" in printed
    assert servers.running(home.path, "ray") is not None
    assert servers.load(home.path, "prefect-embedded") is None
    wait_for(lambda: not home.processes(), "the head to end", DEADLINE_S)
    assert servers.recorded(home.path) == []
    assert len(list((home.path / "store" / "artifacts").glob("policy/*"))) == 1


def test_fault_row_20_ctrl_c_twice_ends_the_job_and_everything(
    prepared: Home, tmp_path: Path
) -> None:
    run = _begin(prepared, tmp_path / "out", *LONG)
    _wait_for_line(tmp_path / "out", "sft  step 3/", run)
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=DEADLINE_S) == 130
    assert prepared.processes() == []


@pytest.mark.slow
def test_head_with_dead_raylet_is_replaced_and_start_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    whole = ray_cluster.head_command
    broken: list[str] = []

    def first_is_broken(*args, **kwargs):
        command = whole(*args, **kwargs)
        if broken:
            return command
        broken.append(command.name)
        return command.model_copy(update={"argv": ("/bin/false",)})

    monkeypatch.setattr(ray_cluster, "head_command", first_is_broken)
    try:
        first = ensure_cluster(tmp_path)
        record = servers.load(tmp_path, "ray")
        assert record is not None
        assert record.process is not None
        family = psutil.Process(record.process.pid).children(recursive=True)
        raylet = next(p for p in family if p.name() == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)
        wait_for(lambda: not ray_cluster.is_ready(record), "the head to be unready", 60.0)
        second = ensure_cluster(tmp_path)
        assert second.started
        assert second.jobs_url != first.jobs_url
        assert second.release() is True
    finally:
        servers.end(tmp_path, "ray")


def _flow_run_states(home: Home) -> list[str]:
    """Of all runs, the oldest first."""
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        return [
            row[0] for row in database.execute("select state_type from flow_run order by created")
        ]
