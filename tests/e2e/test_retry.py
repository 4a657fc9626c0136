"""Runs of the deployment, by the calls of the Prefect UI and by `rlhf run`.

One stack for all: real server, worker and Ray.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import Home, ran, settings

from flows.recipe.recipe import load_recipe
from infra.ray.cluster import ensure_cluster
from infra.ray.jobs import RayJobs
from infra.services.stack import down, running_url, worker_api_url
from infra.store.storage import open_storage
from infra.tracking.journal import read_records
from infra.waiting import wait_for

pytestmark = pytest.mark.stacks

ROOT = Path(__file__).resolve().parents[2]
LABELS = ["preprocess", "sft", "evaluate_sft", "merge", "evaluate", "promote"]
NUM_SFT_STEPS = 4
DEADLINE_S = 600.0
RETRY = {
    "state": {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"},
    "force": True,
}
"""What the button sends."""
REWARD = """
import os
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    job = Path(f"/proc/{{os.getppid()}}/cmdline").read_bytes()
    if b"preflight" not in job and not Path({repaired!r}).exists():
        raise RuntimeError("not yet repaired")
    return float(solution_str.strip() == ground_truth)
"""
"""Fails for a reason outside of it, so that it stays the same reward when that is gone."""


class Server:
    """The Prefect server of a home, by the calls of its UI."""

    def __init__(self, url: str) -> None:
        self._url = url

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """A GET, or a POST of a body; again while the server says that its database is busy."""
        request = urllib.request.Request(
            f"{self._url}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )

        def answered() -> list[Any]:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return [json.loads(answer.read())]
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                return []

        return wait_for(answered, f"an answer to {path}", DEADLINE_S)[0]

    def ended(self, run: str, run_count: int) -> dict[str, Any]:
        """A flow run that ended as often as it says."""

        def at_its_end() -> dict[str, Any] | None:
            found = self.call(f"flow_runs/{run}")
            ends = found["state_type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
            return found if ends and found["run_count"] == run_count else None

        return wait_for(at_its_end, f"end {run_count} of flow run {run}", DEADLINE_S, poll_s=0.5)

    def stages(self, run: str) -> dict[str, list[str]]:
        """By stage, the states of its task runs, the first attempt's first."""
        body = {"flow_runs": {"id": {"any_": [run]}}, "sort": "ID_DESC", "limit": 200}
        found: dict[str, list[str]] = {}
        tasks = [task for task in self.call("task_runs/filter", body) if task["state"]]
        for task in sorted(tasks, key=lambda each: each["expected_start_time"]):
            found.setdefault(task["name"], []).append(task["state"]["name"])
        return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("served") / "run")
    try:
        # On two cores a cluster has four places.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
        command = ["taskset", "-c", cores, sys.executable, "-m", "flows.commands.cli", "up"]
        subprocess.run(command, env=home.environment, check=True, timeout=300)
        yield home
    finally:
        down(home.path)


@pytest.fixture(scope="module")
def server(home: Home) -> Server:
    """With the deployment."""
    url = running_url(home.path, "prefect")
    assert url is not None
    subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--name", "rlhf-pipeline"],
        env={**home.environment, "PREFECT_API_URL": url},
        cwd=ROOT,
        check=True,
        timeout=180,
    )
    return Server(url)


def num_training_steps(home: Home) -> int:
    """Steps that all attempts of all stages together have recorded."""
    journals = (home.path / "store" / "work").glob("*/attempt-*/journal.jsonl")
    records = [record for path in journals for record in read_records(path)[0]]
    return sum("training/global_step" in record.values for record in records)


def test_a_retry_by_the_button_repeats_nothing_that_succeeded(
    home: Home, server: Server, tmp_path: Path
) -> None:
    """Stage 3 of 6 fails; the first is forced by the flow run, and is not forced once more."""
    reward, repaired = tmp_path / "reward.py", tmp_path / "repaired"
    reward.write_text(REWARD.format(repaired=str(repaired)))
    overrides = ["rl.num_rounds=0", f"rl.reward.function={reward}:compute_score"]
    recipe = load_recipe(str(home.recipe), overrides)
    deployment = server.call("deployments/name/rlhf-pipeline/rlhf-pipeline")["id"]
    parameters = {"recipe": recipe.model_dump(mode="json"), "start_from": "preprocess"}
    body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
    run = server.call(f"deployments/{deployment}/create_flow_run", body)["id"]

    failed = server.ended(run, 1)
    assert failed["state_type"] == "FAILED", failed["state"]
    assert "not yet repaired" in failed["state"]["message"]
    assert list(server.stages(run)) == LABELS[:3]
    assert num_training_steps(home) == NUM_SFT_STEPS

    repaired.touch()
    answer = server.call(f"flow_runs/{run}/set_state", RETRY)
    assert answer["status"] == "ACCEPT"
    completed = server.ended(run, 2)
    assert completed["state_type"] == "COMPLETED", completed["state"]
    assert server.stages(run) == {
        "preprocess": ["Completed", "Reused"],
        "sft": ["Completed", "Reused"],
        "evaluate_sft": ["Failed", "Completed"],
        **{label: ["Completed"] for label in LABELS[3:]},
    }
    assert num_training_steps(home) == NUM_SFT_STEPS, "no step was computed again"
    [path] = (home.path / "runs").glob("*/report.json")
    stages = {stage["name"]: stage for stage in json.loads(path.read_text())["stages"]}
    attempts = open_storage(str(home.path / "store")).attempts
    logs = {
        label: [entry.kind for entry in attempts.entries(stages[label]["fingerprint"])]
        for label in LABELS
    }
    once = ["held", "committed"]
    assert logs == {**dict.fromkeys(LABELS, once), "evaluate_sft": ["held", *once]}


def newest(server: Server) -> dict[str, Any]:
    """The flow run that was made last."""
    body = {"sort": "EXPECTED_START_TIME_DESC", "limit": 1}
    [run] = server.call("flow_runs/filter", body)
    return run


def test_a_run_by_the_command_is_one_of_the_deployment(
    home: Home, server: Server, tmp_path: Path
) -> None:
    """It is shown to its end, and fails as the same run in the command's own process."""
    reward, repaired = tmp_path / "reward.py", tmp_path / "repaired"
    reward.write_text(REWARD.format(repaired=str(repaired)))
    failing = settings("seed=1", "rl.num_rounds=0", f"rl.reward.function={reward}:compute_score")
    failed = home.start("run", *failing)
    assert failed.returncode == 1, failed.stderr
    assert "sft  step 4/4" in failed.stdout
    run = newest(server)
    assert (run["state_type"], run["deployment_id"] is None) == ("FAILED", False)
    assert {"rlhf", "self-healing", "recipe:tiny", "platform:cpu"} <= {*run["tags"]}
    body = {"flow_runs": {"id": {"any_": [run["id"]]}}}
    tags = {task["name"]: {*task["tags"]} for task in server.call("task_runs/filter", body)}
    assert tags["sft"] >= {"stage:sft", "recipe:tiny", "platform:cpu"}
    local = home.start("run", *failing, "--local")
    assert newest(server)["deployment_id"] is None
    assert (local.returncode, last(local.stderr)) == (1, last(failed.stderr))

    repaired.touch()
    completed = home.rlhf("run", *failing)
    report = home.report(completed)
    # The test before has promoted a model.
    labels = [*LABELS[:-1], "evaluate_incumbent", LABELS[-1]]
    assert [stage["name"] for stage in report["stages"]] == labels
    assert ran(report) == labels[2:]
    assert newest(server)["state_type"] == "COMPLETED"
    again = home.rlhf("run", *failing, "--local")
    assert endings(again) == endings(completed)


def last(printed: str) -> str:
    """Its last line, but for what differs from attempt to attempt."""
    return re.sub(r"-a\d+|[0-9]+", "", printed.strip().splitlines()[-1])


def endings(printed: str) -> list[str]:
    """What the lines after the table are about."""
    lines = printed.rstrip().rsplit("\n\n", 1)[-1].splitlines()
    return [line.split()[0] for line in lines]


def test_a_deployment_of_another_checkout_or_home_is_not_used(
    home: Home, server: Server, tmp_path: Path
) -> None:
    code = """
from pathlib import Path
from rich.console import Console
from flows.local.local_run import find_or_hint
quiet = Console(quiet=True)
print(find_or_hint(quiet), find_or_hint(quiet, Path("/elsewhere")))
"""
    url = running_url(home.path, "prefect")
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**home.environment, "PREFECT_API_URL": str(url)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    deployment = server.call("deployments/name/rlhf-pipeline/rlhf-pipeline")["id"]
    assert found.stdout.split() == [deployment, "None"]
    assert (worker_api_url(home.path), worker_api_url(tmp_path)) == (url, None)


def test_ctrl_c_cancels_the_run_of_the_deployment_and_its_job(
    home: Home, server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with out.open("w") as file:
        command = home.command("run", *settings("seed=2", "sft.num_steps=100000"))
        process = subprocess.Popen(command, stdout=file, stderr=file, env=home.environment)
    try:
        wait_for(lambda: "sft  step 3/" in out.read_text(), "a step", DEADLINE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=90) == 130, out.read_text()
    finally:
        process.kill()
    assert newest(server)["state_type"] == "CANCELLED"
    assert "run  Cancelled" in out.read_text()
    assert last(out.read_text()) == "interrupted; the same command resumes"
    jobs = RayJobs(ensure_cluster(home.path))
    assert all(each.is_terminal for each in map(jobs.look, started(home)) if each)


def started(home: Home) -> list[str]:
    """Names of the jobs of the stages of a home."""
    attempts = open_storage(str(home.path / "store")).attempts
    works = (home.path / "store" / "work").iterdir()
    return [entry.holder.ray_job for work in works for entry in attempts.entries(work.name)]


def num_waiting(home: Home) -> int:
    """How often a stage said that it waits for room on the cluster."""
    journals = (home.path / "store" / "work").rglob("journal.jsonl")
    records = [record for path in journals for record in read_records(path)[0]]
    return sum((record.message or "").startswith("waits for room") for record in records)


def test_run_waits_for_its_devices_but_not_for_other_runs(home: Home, server: Server) -> None:
    """Of four places one run has three; who wants three queues, who wants one does not."""
    deployment = server.call("deployments/name/rlhf-pipeline/rlhf-pipeline")["id"]

    def start(*overrides: str, faults: str = "") -> str:
        recipe = load_recipe(str(home.recipe), ["rl.num_rounds=0", *overrides])
        body = {
            "parameters": {"recipe": recipe.model_dump(mode="json")},
            "state": {"type": "SCHEDULED"},
            "job_variables": {"env": {"RLHF_FAULTS": faults}} if faults else {},
        }
        return server.call(f"deployments/{deployment}/create_flow_run", body)["id"]

    def training(run: str) -> list[str]:
        return server.stages(run).get("sft", [])

    before = num_training_steps(home)
    wide = ("training.num_workers=3", "sft.batch_size_sequences=6")
    busy = start(*wide, "seed=3", "sft.num_steps=60", faults="journal.before_write=sleep:240@50")
    wait_for(lambda: num_training_steps(home) > before, "a training", DEADLINE_S)
    queued = start(*wide, "seed=4")
    wait_for(lambda: num_waiting(home), "a run that waits for room", DEADLINE_S)
    small = start("seed=5")
    wait_for(lambda: training(small) == ["Completed"], "the small training", DEADLINE_S)
    assert (training(busy), training(queued)) == (["Running"], ["Running"])
    assert [server.ended(run, 1)["state_type"] for run in (small, busy, queued)] == [
        "COMPLETED"
    ] * 3
