"""A run of the deployment for containers, without one: the files of the image where it has them.

Real: the deployment, its pull step, the command by which Prefect's worker has a container run, and
a mount of its own with what the Dockerfile copies and nothing else.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import why_not
from tiny_pipeline import Home

from flows.recipe.recipe import load_recipe
from infra import env
from infra.services.stack import down, running_url
from infra.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "infra" / "docker"
CODE = "/opt/rlhf"
PULL = f"""
import asyncio, yaml
from prefect.deployments.steps.core import run_steps
from prefect.flows import load_flow_from_entrypoint
deploying = yaml.safe_load(open("{CODE}/infra/docker/prefect.yaml"))
pulled = asyncio.run(run_steps(deploying["pull"], print_function=lambda told: None))
for deployment in deploying["deployments"]:
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    print(pulled["directory"], flow.name, flow.fn.__code__.co_filename)
"""
MOUNT = f'mount -t tmpfs tmpfs /opt && mkdir {CODE} && mount --bind "$0" {CODE} && exec "$@"'
DEADLINE_S = 600.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    home = Home(tmp_path_factory.mktemp("image") / "run")
    try:
        command = [sys.executable, "-m", "flows.commands.cli", "up"]
        subprocess.run(command, env=home.environment, check=True, timeout=300)
        yield home
    finally:
        down(home.path)


def copied(to: Path) -> Path:
    """The code as the image has it."""
    for line in (DOCKER / "Dockerfile").read_text("utf-8").splitlines():
        if not line.startswith("COPY "):
            continue
        *sources, _ = shlex.split(line)[1:]
        for source in sources:
            place = to / source
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / source, place)
    return to


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_the_pull_step_leads_to_the_flow_of_the_image(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    code = copied(tmp_path / "code")
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, str(code), sys.executable, "-c", PULL],
        env=env.child_environment(
            PYTHONPATH=CODE,
            PREFECT_HOME=str(tmp_path / "prefect"),
            PREFECT_API_URL="http://127.0.0.1:9/api",  # no step asks it
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    where = f"{CODE} rlhf-pipeline {CODE}/flows/rlhf_pipeline.py"
    assert found.stdout.splitlines() == [where] * 2, found.stderr


@pytest.mark.stacks
def test_a_run_in_the_image_reads_its_code_from_there(home: Home, tmp_path: Path) -> None:
    code, mark = copied(tmp_path / "code"), tmp_path / "mark"
    with (code / "flows" / "rlhf_pipeline.py").open("a") as file:
        file.write(f"\nPath({str(mark)!r}).write_text(__file__)\n")
    url = running_url(home.path, "prefect")
    environment = {
        **home.environment,
        "PREFECT_API_URL": str(url),
        "RLHF_PREFECT_URL": str(url),
        "RLHF_MLFLOW_URL": str(running_url(home.path, "mlflow")),
        "RLHF_IMAGE": "rlhf-pipeline:1",
        "RLHF_DATA": "/srv/rlhf",
    }

    def prefect(*words: str) -> None:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
        subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=180)

    prefect("work-pool", "create", "rlhf-docker", "--type", "docker")
    prefect("deploy", "--prefect-file", "infra/docker/prefect.yaml", "--name", "docker")
    deployment = call(f"{url}/deployments/name/rlhf-pipeline/docker")
    variables = deployment["job_variables"]
    assert variables["image"] == "rlhf-pipeline:1"
    assert variables["volumes"] == ["/srv/rlhf:/data"]
    assert "RAY_ADDRESS" not in variables["env"] or not variables["env"]["RAY_ADDRESS"]
    recipe = load_recipe(str(home.recipe), ["rl.num_rounds=0"])
    body = {"parameters": {"recipe": recipe.model_dump(mode="json")}}
    run = call(f"{url}/deployments/{deployment['id']}/create_flow_run", body)["id"]

    # What the worker of such a pool has the container run, with what it sets.
    execute = [sys.executable, "-m", "prefect", "flow-run", "execute"]
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, str(code), *execute],
        env={
            **environment,
            **variables["env"],
            "PREFECT__FLOW_RUN_ID": run,
            "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
            "PYTHONPATH": CODE,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    found = call(f"{url}/flow_runs/{run}")
    assert found["state_type"] == "COMPLETED", ended.stdout + ended.stderr
    assert mark.read_text() == f"{CODE}/flows/rlhf_pipeline.py"


@pytest.mark.stacks
def test_a_script_serves_the_flow_without_a_worker(home: Home, tmp_path: Path) -> None:
    """The one of the guide."""
    guide = (ROOT / "docs" / "guides" / "operate.md").read_text("utf-8")
    [script] = re.findall(r"^```python\n(.*?serve\(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    (tmp_path / "serve.py").write_text(script)
    url = running_url(home.path, "prefect")
    settings = {"PREFECT_API_URL": str(url), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    server = subprocess.Popen(
        [sys.executable, "serve.py"],
        cwd=tmp_path,
        env={**home.environment, **settings},
        start_new_session=True,
    )

    def deployment() -> str | None:
        with contextlib.suppress(urllib.error.HTTPError):
            return call(f"{url}/deployments/name/rlhf-pipeline/served")["id"]

    try:
        found = wait_for(deployment, "the deployment", DEADLINE_S, poll_s=1.0)
        recipe = load_recipe(str(home.recipe), ["rl.num_rounds=0"])
        body = {
            "parameters": {"recipe": recipe.model_dump(mode="json")},
            "state": {"type": "SCHEDULED"},
        }
        run = call(f"{url}/deployments/{found}/create_flow_run", body)["id"]

        def ended() -> str | None:
            state = call(f"{url}/flow_runs/{run}")["state_type"]
            return state if state in {"COMPLETED", "FAILED", "CRASHED"} else None

        assert wait_for(ended, "the run", DEADLINE_S, poll_s=1.0) == "COMPLETED"
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(timeout=60)
