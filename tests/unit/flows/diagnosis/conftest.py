"""Stages to look at: real healthy curves, and ones made by hand."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from engines.config.stages.base import StageConfig
from engines.config.stages.final import EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from flows.diagnosis.findings import StageView
from flows.recipe.recipe import Recipe, load_recipe

HEALTHY = json.loads((Path(__file__).parent / "healthy_curves.json").read_text("utf-8"))
"""What runs of this project recorded: the quickstart's three rounds of 40 steps and its SFT, and a
round of PPO with a critic. Metric, then one value a step; null where a step has none."""

Steps = dict[int, dict[str, float]]


def columns_to_steps(columns: Mapping[str, Sequence[float | None]], first: int = 1) -> Steps:
    size = max(map(len, columns.values()))
    return {
        first + index: {
            name: value for name, column in columns.items() if (value := column[index]) is not None
        }
        for index in range(size)
    }


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return load_recipe("quickstart")


@pytest.fixture
def round_view(recipe: Recipe) -> Callable[..., StageView]:
    """A round of the quickstart with the columns that it is given."""

    def made(number: int = 1, first: int = 1, **columns: Sequence[float]) -> StageView:
        named = {name.replace("__", "/"): values for name, values in columns.items()}
        steps = columns_to_steps(named, first) if named else {}
        config: StageConfig = RLRoundStageConfig.from_recipe(recipe, number)
        return StageView(config.label, config, steps)

    return made


@pytest.fixture
def evaluation(recipe: Recipe) -> Callable[[str, float], StageView]:
    def made(of: str, accuracy: float) -> StageView:
        config: EvaluateStageConfig = EvaluateStageConfig.from_recipe(recipe, of)
        return StageView(config.label, config, metrics={"accuracy": accuracy})

    return made


@pytest.fixture
def healthy_rounds(recipe: Recipe) -> list[StageView]:
    """The quickstart's, with the accuracy that each reached."""
    steps = columns_to_steps(HEALTHY["quickstart"])
    views = []
    for number in range(1, 4):
        config = RLRoundStageConfig.from_recipe(recipe, number)
        own = {step: steps[step] for step in range(40 * number - 39, 40 * number + 1)}
        views.append(StageView(config.label, config, own))
    return views
