"""The paths of a recipe: local ones made absolute, and aliases of registered models read.

A model is named by a directory, by a hub id, or by its alias in the registry of the recipe's
tracker: `models:/NAME@ALIAS`.
Promises: an existing path is made absolute, since jobs run in directories of their own; anything
else, such as a hub id, stays as it is.
"""

import re
from pathlib import Path
from typing import NamedTuple

from engines.config.algorithm import RewardConfig
from engines.config.data import SOURCE_SPLITS, DataConfig
from engines.config.recipe import Recipe
from engines.config.suite import SuiteConfig
from infra.errors import ConfigError

_SCHEME = "models:"
_FORM = re.compile(r"models:/(?P<name>[^/@]+)@(?P<alias>[^/@]+)")


class RegisteredModel(NamedTuple):
    """An alias in the model registry.

    Attributes:
        alias: of one of its versions.
    """

    name: str
    alias: str


def registered_model(setting: str, path: str) -> RegisteredModel | None:
    """Read the name of a model in the registry.

    Returns:
        None where it is no such name.

    Raises:
        ConfigError: it begins as one and is none.
    """
    if not path.startswith(_SCHEME):
        return None
    found = _FORM.fullmatch(path)
    if found is None:
        raise ConfigError(
            setting,
            f"got {path!r}; need models:/NAME@ALIAS (models:/quickstart@champion); a version has "
            "to bear an alias: give it one",
        )
    return RegisteredModel(found["name"], found["alias"])


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The same recipe, whatever directory it is run in.

    Args:
        recipe: with paths of the current directory.
    """
    recipe = recipe.with_models(lambda _, path: _absolute(path))
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
