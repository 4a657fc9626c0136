"""Which attention a model needs, read from `config.json` alone. No torch: the plan asks, too.

Training and the rollout engine `transformers` replace a model's attention by causal attention, full
or in a window.
Promises: a model that is named here would be refused at its first forward pass, or computed
wrongly. Does not promise that every other one is computed: families are known by name, and another
may ask its attention for what only that pass shows.
"""

from collections.abc import Mapping
from typing import Any

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_SINKS = "attention sinks"
_FAMILIES: Mapping[str, str] = {
    "doge": "a mask that depends on its values",
    "flint": _SINKS,
    "gpt_oss": _SINKS,
    "granite_swa": _SINKS,
    "granitemoe_swa": _SINKS,
    # Its layers take no keyword arguments on to their attention: no packing, no step.
    "nemotron": "layers that tell their attention nothing",
}
"""Model type -> what each of its models needs, whatever its fields say."""


def rotary_type(config: Mapping[str, Any]) -> str:
    """Which rotary embeddings a model has.

    Args:
        config: of a text model, as in `config.json` of any release of transformers.

    Returns:
        transformers' name of them; `default` where nothing is said.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")


def unusual_attention(config: Mapping[str, Any]) -> str | None:
    """What of a model's attention is not computed.

    Args:
        config: of a text model, as in `config.json`.

    Returns:
        Words that follow "a model with"; None where nothing is known against it.
    """
    layer_types = config.get("layer_types") or ()
    unknown = sorted(set(layer_types) - LAYER_TYPES)
    if unknown:
        return f"layers of type {', '.join(unknown)}"
    if config.get("attn_logit_softcapping"):
        return "attention scores with a soft cap"
    # "vision": between the tokens of an image, of which a text model has none.
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        return "attention to later tokens"
    model_type = config.get("model_type")
    if model_type == "mimo_v2_flash" and "sliding_attention" in (layer_types or LAYER_TYPES):
        return _SINKS  # of its layers with a window
    return _FAMILIES.get(str(model_type))
