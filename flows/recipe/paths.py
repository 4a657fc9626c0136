"""Makes the local paths of a recipe absolute, and parses names of registered models.

A model is named by a directory, by a hub id, or by its alias in the registry of the recipe's
tracker: `models:/NAME@ALIAS`.
Promises: an existing path becomes absolute, because jobs run in other directories; anything else,
such as a hub id, is not changed.
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
    """A model in the registry and the alias of one of its versions."""

    name: str
    alias: str


def registered_model(setting: str, path: str) -> RegisteredModel | None:
    """Parse the name of a registered model; None if `path` is not of that form.

    Raises:
        ConfigError: it begins with `models:` and is malformed.
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
    """Return the recipe with paths that do not depend on the current directory."""
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
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path
