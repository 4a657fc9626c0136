"""Cancel on the page of a deployment's training run: it ends, and so does all that it began.

Asked by the very request that Prefect's page sends.
"""

import json
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from tiny_pipeline import RECIPE, Home

from infra.services.stack import down, running_url
from infra.waiting import wait_for

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
ENDS_S = 240.0
LEFT_S = 120.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """With `rlhf up`, and the deployments of the project."""
    home = Home(tmp_path / "run")
    environment = {**home.environment, "PREFECT_HOME": str(tmp_path / "prefect-client")}
    environment["PREFECT_WORKER_QUERY_SECONDS"] = "2"

    def run(*argv: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *argv], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run("flows.commands.cli", "up")
        environment["PREFECT_API_URL"] = running_url(home.path, "prefect") or ""
        run("prefect", "--no-prompt", "deploy", "--all")
        yield home
    finally:
        down(home.path)


def cancel(url: str, run: UUID) -> None:
    """As the button of the page does: any state may be left for this one."""
    asked = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True}
    request = urllib.request.Request(
        f"{url}/flow_runs/{run}/set_state",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["status"] == "ACCEPT"


def of_the_run(home: Home, run: UUID) -> list[psutil.Process]:
    """The flow's process and its family, and the processes of its jobs; not the servers."""
    found = []
    for process in home.processes():
        try:
            ours = process.environ().get("PREFECT__FLOW_RUN_ID") == str(run)
            if ours or "engines.jobs" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def states(home: Home) -> list[str]:
    """Of all runs and stages, as MLflow has them."""
    with closing(sqlite3.connect(home.path / "mlflow.db", 30.0)) as database:
        return sorted(status for (status,) in database.execute("SELECT status FROM runs"))


def test_fault_row_20_run_cancelled_in_the_ui_leaves_nothing(
    home: Home,
) -> None:
    url = running_url(home.path, "prefect")
    assert url is not None
    recipe = yaml.safe_load(RECIPE)
    recipe["sft"]["num_steps"] = 100_000
    with SyncPrefectClient(url) as client:
        deployment = client.read_deployment_by_name("rlhf-pipeline/rlhf-pipeline")
        run = client.create_flow_run_from_deployment(deployment.id, parameters={"recipe": recipe})
        journals = home.path / "store" / "work"
        wait_for(
            lambda: any("train/loss" in file.read_text() for file in journals.rglob("*.jsonl")),
            "the training to begin",
            DEADLINE_S,
        )
        assert of_the_run(home, run.id)
        cancel(url, run.id)

        def is_cancelled() -> bool:
            state = client.read_flow_run(run.id).state
            return state is not None and state.is_cancelled()

        wait_for(is_cancelled, "the run to be cancelled", ENDS_S)
    wait_for(lambda: not of_the_run(home, run.id), "its last process", LEFT_S)
    # The run itself, and the stage that trained; the data was there before.
    wait_for(lambda: "RUNNING" not in states(home), "MLflow to be told", LEFT_S)
    assert states(home) == ["FINISHED", "KILLED", "KILLED"]
