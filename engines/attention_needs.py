"""Which attention a model needs, read from `config.json` alone and without torch.

Training and the rollout engine `transformers` replace a model's attention by causal attention,
full or with a sliding window.
Promises: a model that is refused here would fail at its first forward pass or be computed wrongly.
Does not promise that every other model works: families are known by name.
"""

from collections.abc import Mapping
from typing import Any

_SLIDING = "sliding_attention"
LAYER_TYPES = frozenset({"full_attention", _SLIDING})
_SINKS = "attention sinks"
_QWEN_WINDOW = 4096
"""Window of a Qwen model whose configuration enables a window without a size."""
_FAMILIES: Mapping[str, str] = {
    "doge": "a mask that depends on its values",
    "flint": _SINKS,
    "gpt_oss": _SINKS,
    "granite_swa": _SINKS,
    "granitemoe_swa": _SINKS,
    # Its layers pass no keyword arguments to their attention, so sequences cannot be packed.
    "nemotron": "layers that pass no keyword arguments to their attention",
}
"""Model type -> unsupported feature of all its models, whatever their other fields are."""


def rotary_type(config: Mapping[str, Any]) -> str:
    """Return transformers' name of a text model's rotary embeddings; `default` if none is given."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")


def layer_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Return how many tokens a query of each layer sees; None means all earlier tokens."""
    model_type = str(config.get("model_type"))
    # Qwen's window is off unless it is switched on; other families have no switch.
    is_on = config.get("use_sliding_window", not model_type.startswith("qwen"))
    default = _QWEN_WINDOW if config.get("use_sliding_window") else None
    window = (config.get("sliding_window", default) or None) if is_on else None
    kinds = config.get("layer_types")
    if kinds:
        return [window if kind == _SLIDING else None for kind in kinds]
    # Qwen3's MoE models have `max_window_layers` and ignore it: all their layers have the window.
    first = 0 if model_type == "qwen3_moe" else int(config.get("max_window_layers") or 0)
    return [window if layer >= first else None for layer in range(num_layers)]


def has_windows(config: Mapping[str, Any]) -> bool:
    """True if a layer has a window or the type `sliding_attention`; always False for Llama."""
    if config.get("model_type") == "llama":
        return False
    return _SLIDING in (config.get("layer_types") or ()) or any(
        layer_windows(config, int(config.get("num_hidden_layers") or 1))
    )


def unusual_attention(config: Mapping[str, Any]) -> str | None:
    """Return the unsupported attention feature, in words after "a model with", or None."""
    layer_types = config.get("layer_types") or ()
    unknown = sorted(set(layer_types) - LAYER_TYPES)
    if unknown:
        return f"layers of type {', '.join(unknown)}"
    if config.get("attn_logit_softcapping"):
        return "attention scores with a soft cap"
    # "vision" is about tokens of an image; a text model has none.
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        return "attention to later tokens"
    model_type = config.get("model_type")
    if model_type == "mimo_v2_flash" and _SLIDING in (layer_types or LAYER_TYPES):
        return _SINKS  # only its layers with a window have sinks
    return _FAMILIES.get(str(model_type))
