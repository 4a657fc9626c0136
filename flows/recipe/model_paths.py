"""Every setting of a recipe that names a model, and the name of one in the registry.

A model is named by a directory, by a hub id, or by the alias that it bears in the registry of the
recipe's tracker: `models:/NAME@ALIAS`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from pydantic import BaseModel

from infra.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)

SETTINGS = (
    "model.path", "rl.reward.model.path", "rl.reward.judge.path", "rl.distillation.path",
    "against.path",
)  # fmt: skip
_SCHEME = "models:"
_FORM = re.compile(r"models:/(?P<name>[^/@]+)@(?P<alias>[^/@]+)")


class RegisteredModel(NamedTuple):
    """What bears an alias.

    Attributes:
        name: of the registered model.
        alias: of one of its versions.
    """

    name: str
    alias: str


def registered_model(setting: str, path: str) -> RegisteredModel | None:
    """Read the name of a model in the registry.

    Args:
        setting: that has it.
        path: its value.

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


def model_paths(recipe: BaseModel) -> Iterator[tuple[str, str]]:
    """The settings of a recipe that name a model, and their values."""
    for setting in SETTINGS:
        value = recipe
        for name in setting.split("."):
            value = None if value is None else getattr(value, name)
        if isinstance(value, str):
            yield setting, value


def with_model_paths(recipe: Config, new: Callable[[str, str], str]) -> Config:
    """The same recipe with other names of its models.

    Args:
        recipe: whose.
        new: from a setting and its value to its new value.

    Returns:
        A copy.
    """
    for setting, value in model_paths(recipe):
        recipe = _with(recipe, setting.split("."), new(setting, value))
    return recipe


def _with(config: Config, names: Sequence[str], value: str) -> Config:
    first, *rest = names
    inner = _with(getattr(config, first), rest, value) if rest else value
    return config.model_copy(update={first: inner})
