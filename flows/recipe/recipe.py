"""A recipe from a YAML file or from plain data, checked.

Promises: `load_recipe` either returns a recipe whose fields agree with each other, or raises one
`ConfigError` line in well under a second, without torch.
Does not promise: that data and models are well formed inside; the jobs check that in preflight.
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
    """Validate plain data as a recipe.

    Args:
        data: nested mappings, as YAML or JSON gives them.

    Returns:
        The recipe; its fields agree with each other.

    Raises:
        ConfigError: one line about what is wrong.
    """
    refuse_secrets(data)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise to_config_error(error, Recipe) from None
    return prepare_recipe(recipe)


def prepare_recipe(recipe: Recipe) -> Recipe:
    """Make a recipe's local paths absolute, and check its fields against each other.

    Args:
        recipe: a recipe whose fields are valid one by one, as a Prefect parameter is.

    Raises:
        ConfigError: one line about what is wrong.
    """
    recipe = with_absolute_paths(recipe)
    check_recipe(recipe)
    return recipe


def load_recipe(
    name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None
) -> Recipe:
    """Load, overlay and validate a recipe.

    Args:
        name_or_path: a shipped name (`quickstart`) or a YAML file.
        overrides: `path.to.key=value`, applied in order, the value in YAML.
        seed: replaces the recipe's seed; None keeps it.

    Raises:
        ConfigError: one line about what is wrong.
    """
    data = read_recipe(name_or_path, overrides)
    if seed is not None:
        data["seed"] = seed
    return parse_recipe(data)
