"""Finds the `config.json` of the models that a recipe names; never their weights.

`published_models.json` has the sizes of the models of the recipes that ship, copied from each
model's `config.json` on the Hugging Face hub, so that those recipes are planned without a network.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engines.config.base import local_path
from engines.config.model import ModelConfig
from engines.config.recipe import Recipe
from engines.cost.model_shape import ModelShape
from engines.cost.workload import ShapeOf
from infra.errors import ConfigError

PUBLISHED_MODELS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("published_models.json").read_text(encoding="utf-8")
)
"""Sizes of published models by hub id."""
_CONFIG = "config.json"


def shapes_of(recipe: Recipe) -> ShapeOf:
    """Return a function from a recipe's setting (`model.path`) to the shape of its model.

    It raises `ConfigError` if `config.json` is not found, is no JSON, or lacks a size.
    """
    paths = dict(recipe.models())

    @cache
    def shape_of(setting: str, values: bool) -> ModelShape:
        # A reward model without a path is trained from the recipe's own model.
        setting = setting if setting in paths else "model.path"
        path = paths.get(setting)
        revision = recipe.model.revision if setting == "model.path" else None
        config = config_of(setting, path, revision) if path else made(recipe.model)
        try:
            return ModelShape.from_config(config, values=values)
        except ValueError as error:
            raise ConfigError(setting, f"got {path}: {error}") from None

    return shape_of


def made(model: ModelConfig) -> Mapping[str, Any]:
    """Return the configuration of a model that is made from scratch; the vocabulary is a limit."""
    shape = model.architecture
    return {
        **shape.model_dump(),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": model.tokenizer.vocab_size,
    }


def config_of(setting: str, path: str, revision: str | None = None) -> Mapping[str, Any]:
    """Return a model's `config.json`: of a directory, a published model, or the hub."""
    directory = local_path(path)
    if directory is None and revision is None and path in PUBLISHED_MODELS:
        return PUBLISHED_MODELS[path]
    try:
        file = directory / _CONFIG if directory else _downloaded(path, revision)
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            setting,
            f"got {path}, whose {_CONFIG} was not found here, in the hub's cache or on the hub "
            f"({reason}); need it for the sizes; name a directory that has it",
        ) from None


def _downloaded(path: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(path, _CONFIG, revision=revision)
    return Path(
        cached if isinstance(cached, str) else hf_hub_download(path, _CONFIG, revision=revision)
    )
