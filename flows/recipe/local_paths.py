"""The local paths of a recipe, made absolute: jobs run in directories of their own.

Promises: a path that exists is one of the directory of whoever loads the recipe; anything else,
such as a hub id, stays as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engines.config.algorithm import RewardConfig
from engines.config.data import SOURCE_SPLITS, DataConfig
from engines.config.suite import SuiteConfig
from flows.recipe.model_paths import with_model_paths

if TYPE_CHECKING:
    from flows.recipe.recipe import Recipe


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The same recipe, whatever directory it is run in.

    Args:
        recipe: with paths of the current directory.

    Returns:
        A copy.
    """
    recipe = with_model_paths(recipe, lambda _, path: _absolute(path))
    rl = recipe.rl.model_copy(update={"reward": _reward(recipe.rl.reward)})
    suites = {name: _suite(suite) for name, suite in recipe.suites.items()}
    data = _data(recipe.data) if recipe.data else None
    return recipe.model_copy(update={"data": data, "rl": rl, "suites": suites})


def _data(data: DataConfig) -> DataConfig:
    sources = {
        split: tuple(
            source.model_copy(update={"path": _absolute(source.path)})
            for source in getattr(data, split)
        )
        for split in SOURCE_SPLITS
    }
    return data.model_copy(update=sources)


def _reward(reward: RewardConfig) -> RewardConfig:
    return reward.with_functions(
        {
            path: f"{_absolute(str(part.file))}:{part.function_in_file}"
            for path, part in reward.parts.items()
            if part.file is not None
        }
    )


def _suite(suite: SuiteConfig) -> SuiteConfig:
    harness = suite.harness
    if harness and harness.include:
        harness = harness.model_copy(update={"include": _absolute(harness.include)})
    found = {
        "data": _data(suite.data) if suite.data else None,
        "harness": harness,
        "reward": _reward(suite.reward) if suite.reward else None,
    }
    return suite.model_copy(update=found)


def _absolute(path: str) -> str:
    """An existing local path in full; anything else as it is."""
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path
