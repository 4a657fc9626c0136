"""Loads and checks a recipe from a YAML file or from plain data.

Promises: `load_recipe` returns a recipe with consistent fields or raises one `ConfigError` line, in
well under a second and without torch.
Does not promise: that data and models are well formed; preflight checks them.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from engines.config.recipe import NOT_IDENTITY, LocationConfig, Recipe
from flows.recipe.paths import with_absolute_paths
from flows.recipe.secrets import refuse_secrets
from flows.recipe.source import read_recipe
from flows.recipe.validation import check_recipe
from infra.field_errors import to_config_error

__all__ = [
    "NOT_IDENTITY",
    "LocationConfig",
    "Recipe",
    "load_recipe",
    "parse_recipe",
    "prepare_recipe",
]


def parse_recipe(data: Any) -> Recipe:
    """Parse and check a recipe of nested mappings, as YAML or JSON gives them.

    Raises:
        ConfigError: the recipe is invalid.
    """
    refuse_secrets(data)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise to_config_error(error, Recipe) from None
    return prepare_recipe(recipe)


def prepare_recipe(recipe: Recipe) -> Recipe:
    """Make local paths absolute, and check the fields against each other.

    Raises:
        ConfigError: the recipe is invalid.
    """
    recipe = with_absolute_paths(recipe)
    check_recipe(recipe)
    return recipe


def load_recipe(
    name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None
) -> Recipe:
    """Load a recipe with overrides and check it.

    Args:
        name_or_path: a shipped name (`quickstart`) or a YAML file.
        overrides: `path.to.key=value`, applied in order, the value in YAML.
        seed: replaces the recipe's seed; None keeps it.

    Raises:
        ConfigError: the recipe is invalid.
    """
    data = read_recipe(name_or_path, overrides)
    if seed is not None:
        data["seed"] = seed
    return parse_recipe(data)
