"""The image, and the deployments that run in it: what they name is there, and agrees."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import prefect
import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect.utilities.templating import apply_values, find_placeholders

ROOT = Path(__file__).resolve().parents[4]
DOCKER = ROOT / "infra" / "docker"
LINES = (DOCKER / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
DEPLOYING: dict[str, Any] = yaml.safe_load((DOCKER / "prefect.yaml").read_text("utf-8"))
DEPLOYMENTS = {each["name"]: each for each in DEPLOYING["deployments"]}


def instructions(name: str) -> list[list[str]]:
    """Arguments of every instruction of a name."""
    return [shlex.split(line)[1:] for line in LINES if line.startswith(f"{name} ")]


def template(name: str) -> dict[str, Any]:
    """Of the work pool of a deployment: Prefect's own, or ours."""
    if name == "kubernetes":
        return json.loads((ROOT / "infra" / "kubernetes" / "job_template.json").read_text("utf-8"))
    views = Path(prefect.__file__).parent / "server" / "api" / "collections_data" / "views"
    workers = json.loads((views / "aggregate-worker-metadata.json").read_text("utf-8"))
    return next(each[name] for each in workers.values() if name in each)[
        "default_base_job_configuration"
    ]


def test_everything_that_is_copied_is_there_and_is_sent() -> None:
    rules = (DOCKER / "Dockerfile.dockerignore").read_text("utf-8").split()
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {source for *sources, _ in instructions("COPY") for source in sources}
    assert copied == sent
    assert all((ROOT / source).exists() for source in copied)


def test_every_package_of_the_project_is_in_the_image() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    setuptools = project["tool"]["setuptools"]
    moved = setuptools["package-dir"]
    copied = [source for *sources, _ in instructions("COPY") for source in sources]
    for package in setuptools["packages"]:
        place = moved.get(package, package.replace(".", "/"))
        assert any(place == each or place.startswith(f"{each}/") for each in copied), package
    [makefile] = [line for line in LINES if "make " in line and line.startswith("RUN --mount")]
    assert "/opt/venv/.installed-${DEVICE}" in makefile, "the one rule that installs the lock"


def test_the_code_is_read_where_the_image_has_it() -> None:
    [step] = DEPLOYING["pull"]
    [[directory]] = instructions("WORKDIR")
    assert step == {"prefect.deployments.steps.set_working_directory": {"directory": directory}}


@pytest.mark.parametrize("name", ["docker", "kubernetes"])
def test_a_pool_understands_what_its_deployment_asks_for(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    main = yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))["deployments"][0]
    for field in ("entrypoint", "tags", "concurrency_limit"):
        assert deployment[field] == main[field]
    pool, asked = template(name), deployment["work_pool"]["job_variables"]
    beats = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
    assert asked["env"][beats] == main["work_pool"]["job_variables"]["env"][beats]
    assert asked.keys() <= pool["variables"]["properties"].keys()
    Draft202012Validator(pool["variables"]).validate(asked)


def test_pod_matches_the_image_container_data_and_secrets() -> None:
    pool = template("kubernetes")
    values = {
        key: each["default"]
        for key, each in pool["variables"]["properties"].items()
        if "default" in each
    }
    values |= DEPLOYMENTS["kubernetes"]["work_pool"]["job_variables"]
    values |= {"image": "rlhf:1", "data_claim": "shared", "env": {"A": "b"}, "labels": {}}
    rendered = apply_values(pool["job_configuration"], {**values, "name": "n", "command": ["c"]})
    assert not find_placeholders(rendered)
    pod = rendered["job_manifest"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("rlhf:1", "IfNotPresent")
    assert container["envFrom"] == [{"secretRef": {"name": "rlhf", "optional": True}}]
    [user] = [line for line in LINES if "useradd" in line]
    assert f"--uid {pod['securityContext']['runAsUser']} " in user
    volumes = {each["name"]: each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]}
    places = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert places == {"/data": "shared"}
