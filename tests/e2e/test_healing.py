"""Killed workers and flow processes under `rlhf up`: runs go on by themselves, but not for ever.

One stack for all: while one run waits out the silence of its killed process, the others are done.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelling
from tiny_pipeline import RECIPE, Home

from flows.automations import MAX_RESUMES, SILENCE_S, STRANDED_S, TAG
from infra.host import servers
from infra.services.stack import WORK_POOL, down, running_url
from infra.store.storage import open_storage
from infra.waiting import wait_for

pytestmark = pytest.mark.stacks

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
ENDS_S = 240.0
PROBES = """
import os, signal, time
from prefect import flow
from prefect.runtime import flow_run

@flow
def holds():
    if flow_run.run_count == 1:
        time.sleep(600)

@flow
def dies():
    os.kill(os.getpid(), signal.SIGKILL)

@flow
def fails():
    raise ValueError("a real error")

@flow
def waits():
    time.sleep(600)
"""


@dataclass
class Stack:
    """`rlhf up` in a home of its own, with the deployments of the project and of the probes."""

    home: Path
    client: SyncPrefectClient

    def start(self, name: str, **options) -> UUID:
        """A run of a deployment."""
        deployment = self.client.read_deployment_by_name(name)
        return self.client.create_flow_run_from_deployment(deployment.id, **options).id

    def run(self, run: UUID) -> FlowRun:
        """What the server knows of a run."""
        return self.client.read_flow_run(run)

    def history(self, run: UUID) -> list[State]:
        """Its states, the oldest first."""
        return sorted(self.client.read_flow_run_states(run), key=lambda state: state.timestamp)

    def wait(self, run: UUID, name: str, count: int = 1, deadline_s: float = DEADLINE_S) -> None:
        """Until the run came into a state of that name so many times."""

        def came() -> bool:
            return Counter(state.name for state in self.history(run))[name] >= count

        wait_for(came, f"{name} of {self.run(run).name}, {count} times", deadline_s, poll_s=0.5)

    def processes(self, word: str, run: UUID | None = None) -> list[psutil.Process]:
        """Of the worker's family, with that word in the command line, and of a run."""
        record = servers.load(self.home, "worker")
        assert record is not None
        found = []
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                ours = environ.get("RLHF_PROCESS_MARK") == record.mark
                of_run = run is None or environ.get("PREFECT__FLOW_RUN_ID") == str(run)
                if ours and of_run and word in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def kill(self, *processes: psutil.Process) -> None:
        """All at one moment: none of them can tell of another's end."""
        assert processes
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = Home(tmp_path_factory.mktemp("healing") / "run")
    prefect_home = str(home.path.parent / "prefect-client")
    environment = {**home.environment, "PREFECT_HOME": prefect_home}
    environment["PREFECT_WORKER_QUERY_SECONDS"] = "2"
    probes = home.path.parent / "probes"
    probes.mkdir()
    (probes / "probes.py").write_text(PROBES)
    deployments = [
        {
            "name": name,
            "entrypoint": f"probes.py:{name}",
            "tags": [TAG],
            "work_pool": {"name": WORK_POOL},
            **({"concurrency_limit": 1} if name == "holds" else {}),
        }
        for name in ("dies", "fails", "waits", "holds")
    ]
    (probes / "prefect.yaml").write_text(yaml.safe_dump({"deployments": deployments}))

    def run(*argv: str, cwd: Path = ROOT) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *argv], env=environment, cwd=cwd, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        assert run("flows.commands.cli", "up").count("created") == 5
        assert run("flows.commands.cli", "automations").count("unchanged") == 5
        url = running_url(home.path, "prefect")
        assert url is not None
        environment["PREFECT_API_URL"] = url
        for directory in (ROOT, probes):
            run("prefect", "--no-prompt", "deploy", "--all", cwd=directory)
        with SyncPrefectClient(url) as client:
            yield Stack(home.path, client)
    finally:
        down(home.path)


@pytest.fixture(scope="module")
def pipeline(stack: Stack) -> UUID:
    """A run whose training is busy for a while with its fiftieth record; no other stage has one."""
    recipe = yaml.safe_load(RECIPE)
    recipe["sft"]["num_steps"] = 60
    return stack.start(
        "rlhf-pipeline/rlhf-pipeline",
        parameters={"recipe": recipe},
        job_variables={"env": {"RLHF_FAULTS": "journal.before_write=sleep:100@50"}},
    )


@pytest.fixture(scope="module")
def probes(stack: Stack, pipeline: UUID) -> dict[str, UUID]:  # noqa: ARG001  (it is to be first)
    return {name: stack.start(f"{name}/{name}") for name in ("dies", "fails", "waits")}


@pytest.fixture(scope="module")
def held(stack: Stack, probes: dict[str, UUID]) -> tuple[UUID, UUID]:
    """A run that holds the only slot of its deployment, and one that waits for it."""
    assert probes
    first = stack.start("holds/holds")
    stack.wait(first, "Running")
    second = stack.start("holds/holds")
    stack.wait(second, "AwaitingConcurrencySlot")
    return first, second


def _training(stack: Stack) -> list[str]:
    """Kinds of the entries in the log of the stage that trains."""
    store = stack.home / "store"
    attempts = open_storage(str(store)).attempts
    for work in (store / "work").glob("*"):
        log = attempts.entries(work.name)
        if log and log[0].holder.ray_job.startswith(f"sft-{work.name[:8]}"):
            return [entry.kind for entry in log]
    return []


def test_fault_row_17_new_flow_process_attaches_after_a_kill(
    stack: Stack, pipeline: UUID, probes: dict[str, UUID]
) -> None:
    assert probes
    journals = stack.home / "store" / "work"
    wait_for(
        lambda: any("train/loss" in file.read_text() for file in journals.rglob("*.jsonl")),
        "the training to begin",
        DEADLINE_S,
    )
    stack.kill(*stack.processes("", pipeline))
    stack.wait(pipeline, "Crashed", deadline_s=ENDS_S)
    stack.wait(pipeline, "AwaitingRetry", deadline_s=STRANDED_S + ENDS_S)
    stack.wait(pipeline, "Running", 2)
    assert _training(stack) == ["held"]


def test_fault_row_20_a_cancelled_run_and_a_failed_one_end(
    stack: Stack, probes: dict[str, UUID]
) -> None:
    stack.wait(probes["fails"], "Failed")
    stack.wait(probes["waits"], "Running")
    stack.client.set_flow_run_state(probes["waits"], Cancelling(), force=True)
    stack.wait(probes["waits"], "Cancelled", deadline_s=ENDS_S)


def test_fault_row_17_killed_worker_restarts_and_run_completes(
    stack: Stack, pipeline: UUID, probes: dict[str, UUID], held: tuple[UUID, UUID]
) -> None:
    keeper = servers.running(stack.home, "worker")
    assert keeper is not None
    wait_for(
        lambda: not stack.processes("", probes["dies"]), "a pause between two crashes", DEADLINE_S
    )
    worker = [each for each in stack.processes("worker start") if each.pid != _pid(keeper)]
    stack.kill(*worker, *stack.processes("", pipeline), *stack.processes("", held[0]))
    wait_for(
        lambda: set(stack.processes("worker start")) - {*worker, psutil.Process(_pid(keeper))},
        "the worker",
        ENDS_S,
    )
    assert servers.running(stack.home, "worker") == keeper
    stack.wait(pipeline, "Crashed", 2, deadline_s=SILENCE_S + ENDS_S)
    crash = [state for state in stack.history(pipeline) if state.name == "Crashed"][-1]
    assert crash.message == f"no sign of life for {SILENCE_S} s"
    stack.wait(pipeline, "Completed")
    assert _training(stack) == ["held", "committed"]
    assert stack.run(pipeline).run_count == 3
    stack.wait(held[0], "Crashed")
    stack.wait(held[1], "Running")


def test_repeatedly_crashing_run_is_given_up_others_stay_ended(
    stack: Stack, probes: dict[str, UUID]
) -> None:
    stack.wait(probes["dies"], "Stranded", MAX_RESUMES + 1)
    time.sleep(10.0)  # a resumption follows within one
    names = Counter(state.name for state in stack.history(probes["dies"]))
    assert (names["Running"], names["AwaitingRetry"]) == (MAX_RESUMES + 1, MAX_RESUMES)
    state = stack.run(probes["dies"]).state
    assert state is not None
    assert state.is_crashed()
    assert f"at most {MAX_RESUMES} times" in (state.message or "")
    ended = {name: stack.run(probes[name]) for name in ("fails", "waits")}
    assert [(run.state_name, run.run_count) for run in ended.values()] == [
        ("Failed", 1),
        ("Cancelled", 1),
    ]


def _pid(keeper: servers.ServerRecord) -> int:
    assert keeper.process is not None
    return keeper.process.pid
