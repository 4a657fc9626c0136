"""Checks that a transformers architecture fits the engines that compute with it.

An engine replaces the model's attention and passes positions that count from 0 in each sequence.
Promises: finds an architecture that ignores the replaced attention or begins positions after 0;
reasons continue a sentence that begins with the model's directory ("is a ..."). What `config.json`
alone shows is checked by `engines.attention_needs`.
Does not promise that every other architecture works.
"""

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def model_class(auto_class: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the model class that an auto class of transformers has for `config`, or None."""
    try:
        found = auto_class._model_mapping[type(config)]
    except KeyError:
        return None
    return found[0] if isinstance(found, tuple) else found


def class_refusal(auto_class: Any, config: PretrainedConfig) -> str | None:
    """Return why the model class of an auto class for `config` is unusable; None: it is usable."""
    # Checked before the model is made: some classes fail when they look their attention up by name.
    made = model_class(auto_class, config)
    if made is None:
        return f"is a {config.model_type}, of which transformers has no {auto_class.__name__}"
    return attention_refusal(made)


def text_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the `config.json` fields of a text model, or of a vision model's text part."""
    # Some configurations compute `layer_types` and leave the field out of `to_dict`.
    text = config.get_text_config()
    return {**text.to_dict(), "layer_types": getattr(text, "layer_types", None)}


def attention_refusal(made: type[PreTrainedModel]) -> str | None:
    """Return why the attention of a model class cannot be replaced, or None."""
    can_replace = made._supports_attention_backend
    return None if can_replace else f"is a {made.__name__}, whose attention cannot be replaced"


def position_refusal(model: PreTrainedModel) -> str | None:
    """Return why the positions of a model do not count from 0, or None.

    RoBERTa (arXiv:1907.11692) and related models count from the padding token's id + 1.
    """
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and isinstance(module, nn.Embedding)
            and module.padding_idx is not None
        ):
            return f"is a {type(model).__name__}, whose positions count from its padding token on"
    return None
