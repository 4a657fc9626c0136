"""What a job reserves for its own process: nothing that has to come with other things."""

from typing import Any

import pytest

from engines.config.rollout import RolloutConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.final import EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.recipe.recipe import load_recipe

DISAGGREGATED = "rollout.placement=disaggregated"
ONE_CPU = {"num_cpus": 1}


@pytest.mark.parametrize(
    ("overrides", "sft", "rl_round", "evaluate"),
    [
        (["hardware.platform=cpu"], ONE_CPU, ONE_CPU, ONE_CPU),
        (
            ["hardware.platform=nvidia"],
            {"num_cpus": 1, "num_gpus": 1},
            {"num_cpus": 1, "num_gpus": 1},
            {"num_cpus": 1, "num_gpus": 1},
        ),
        (
            ["hardware.platform=huawei", DISAGGREGATED],
            {"num_cpus": 1, "resources": {"NPU": 1}},
            {},
            {},
        ),
        (["hardware.platform=cpu", "training.num_workers=2"], {}, {}, ONE_CPU),
    ],
)
def test_a_driver_reserves_what_it_computes_on(
    overrides: list[str], sft: dict[str, Any], rl_round: dict[str, Any], evaluate: dict[str, Any]
) -> None:
    recipe = load_recipe("quickstart", overrides)
    stages = (
        SFTStageConfig.from_recipe(recipe),
        RLRoundStageConfig.from_recipe(recipe, 1),
        EvaluateStageConfig.from_recipe(recipe),
    )
    assert [stage.driver_resources for stage in stages] == [sft, rl_round, evaluate]
    assert PreprocessStageConfig.from_recipe(recipe).driver_resources == ONE_CPU


def test_colocated_sampler_adds_no_driver_resources() -> None:
    recipe = load_recipe("quickstart", ["hardware.platform=nvidia"])
    for stage in (
        RLRoundStageConfig.from_recipe(recipe, 1),
        EvaluateStageConfig.from_recipe(recipe),
    ):
        assert (
            stage.model_copy(update={"rollout": RolloutConfig(engine="vllm")}).driver_resources
            == {}
        )
