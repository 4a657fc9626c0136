"""`prefect.yaml`: its deployments lead to flows of their names, and none runs unasked."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule

from flows.nightly.nightly_recipes import MATRIX
from flows.recipe.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[3]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))[
    "deployments"
]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_a_deployment_is_a_flow_of_its_name(deployment: dict[str, Any]) -> None:
    path, _, name = deployment["entrypoint"].partition(":")
    assert (ROOT / path).is_file()
    found = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    # `prefect deployment run NAME` means NAME/NAME.
    assert found.name == deployment["name"]
    parameters = inspect.signature(found.fn).parameters.values()
    assert all(each.default is not inspect.Parameter.empty for each in parameters)


def test_nightly_schedule_is_valid_but_inactive() -> None:
    schedules = {each["name"]: each.get("schedules", []) for each in DEPLOYMENTS}
    [nightly] = schedules.pop("nightly-recipes")
    assert CronSchedule(cron=nightly["cron"], timezone=nightly["timezone"])
    assert nightly["active"] is False
    assert not any(schedules.values())


def test_the_matrix_is_of_recipes_that_need_nothing_from_outside() -> None:
    for name in MATRIX:
        assert load_recipe(name).target is None, "a recipe in a published size takes no minutes"
