"""Pipelines whose ranks and replica have a node each: left alone, and with a node cut off."""

from typing import Any

import pytest
from namespaces import PIPELINES, PIPELINES_DEADLINE_S, environment_of_nodes, printed_by

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root, scenarios = tmp_path_factory.mktemp("pipelines"), ("whole", "replica", "rank")
    environment = environment_of_nodes()
    return printed_by(PIPELINES, root, environment, PIPELINES_DEADLINE_S, *scenarios)


def trained(pipeline: dict[str, Any]) -> dict[str, str]:
    """Digests of what the weights went through."""
    return {name: pipeline["digests"][name] for name in ("sft", "rl_round_1", "merge")}


def steps_of(pipeline: dict[str, Any]) -> list[int]:
    return sorted(values["step"] for values in pipeline["values"])


def test_a_pipeline_whose_ranks_and_replica_have_a_node_each(pipelines: dict[str, Any]) -> None:
    whole = pipelines["whole"]
    assert whole["code"] == 0, whole["printed"]
    assert whole["accuracy"] is not None
    assert steps_of(whole) == list(range(1, 17))
    assert all(values["actor/grad_norm"] > 0 for values in whole["values"])


def test_a_replica_whose_node_dies_starts_on_another_one(pipelines: dict[str, Any]) -> None:
    struck = pipelines["replica"]
    assert struck["code"] == 0, struck["printed"]
    assert trained(struck) == trained(pipelines["whole"])
    assert steps_of(struck) == list(range(1, 17))
    assert sum(values["rollout/num_restarts"] > 0 for values in struck["values"]) > 0


def test_rank_node_death_ends_the_stage_and_next_run_continues(
    pipelines: dict[str, Any],
) -> None:
    resumed = pipelines["rank"]
    failed = resumed["failed"]
    assert failed["code"] == 1
    assert f"of 2 on node {resumed['lost']} failed in " in failed["printed"]
    assert failed["seconds"] < 60.0, "Ray itself would have noticed by then"
    assert resumed["code"] == 0, resumed["printed"]
    assert "continuing after step" in resumed["printed"]
    assert trained(resumed) == trained(pipelines["whole"])
