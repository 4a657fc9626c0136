"""What a transformers architecture must have before an engine of ours computes with it.

An engine replaces the model's attention and hands it positions that count from 0 in each sequence.
Promises: an architecture that would ignore the one or misread the other is named here, in words
that continue a sentence about its directory. What its configuration alone tells is said by
`engines.attention_needs`. Does not promise that every other one is computed: an attention function
may learn what a layer wants of it only when it is called.
"""

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def model_class(auto_class: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that an auto class of transformers makes of a configuration, if it has one."""
    try:
        found = auto_class._model_mapping[type(config)]
    except KeyError:
        return None
    return found[0] if isinstance(found, tuple) else found


def class_refusal(auto_class: Any, config: PretrainedConfig) -> str | None:
    """Why no model is to be made of a configuration.

    Args:
        auto_class: of transformers, as `AutoModelForCausalLM`.
        config: of the model.

    Returns:
        What is against it; None where nothing is known.
    """
    # Asked before the model is made: some of these look their attention up by name and find none.
    made = model_class(auto_class, config)
    if made is None:
        return f"is a {config.model_type}, of which transformers has no {auto_class.__name__}"
    return attention_refusal(made)


def text_settings(config: PretrainedConfig) -> dict[str, Any]:
    """The fields that `config.json` has of a model, or of the text model in it."""
    # Some configurations compute the types of their layers and keep them out of their dictionary.
    text = config.get_text_config()
    return {**text.to_dict(), "layer_types": getattr(text, "layer_types", None)}


def attention_refusal(made: type[PreTrainedModel]) -> str | None:
    """As `class_refusal`, of a class: it must take its attention from transformers' interface."""
    if made._supports_attention_backend:
        return None
    return f"is a {made.__name__}, whose attention cannot be replaced"


def position_refusal(model: PreTrainedModel) -> str | None:
    """As `class_refusal`, of a model: its positions must count from 0.

    RoBERTa (arXiv:1907.11692) and its kin count from the padding token's id + 1 on.
    """
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and isinstance(module, nn.Embedding)
            and module.padding_idx is not None
        ):
            return f"is a {type(model).__name__}, whose positions count from its padding token on"
    return None
