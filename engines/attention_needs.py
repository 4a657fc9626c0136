"""Which attention a model needs, read from `config.json` alone. No torch: the plan asks, too.

Training and the rollout engine `transformers` replace a model's attention by causal attention, full
or in a window.
Promises: a model that is named here would be refused at its first forward pass, or computed
wrongly. Does not promise that every other one is computed: families are known by name, and another
may ask its attention for what only that pass shows.
"""

from collections.abc import Mapping
from typing import Any

_SLIDING = "sliding_attention"
LAYER_TYPES = frozenset({"full_attention", _SLIDING})
_SINKS = "attention sinks"
_QWEN_WINDOW = 4096
"""Of a Qwen model that has a window and does not say which."""
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


def layer_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """How far each layer looks back.

    Args:
        config: of a text model, as in `config.json`, or with transformers' defaults filled in.
        num_layers: of the model.

    Returns:
        By layer, how many tokens a query sees; None is all before it.
    """
    model_type = str(config.get("model_type"))
    # Qwen's window is off unless it is switched on; other families have no switch.
    is_on = config.get("use_sliding_window", not model_type.startswith("qwen"))
    default = _QWEN_WINDOW if config.get("use_sliding_window") else None
    window = (config.get("sliding_window", default) or None) if is_on else None
    kinds = config.get("layer_types")
    if kinds:
        return [window if kind == _SLIDING else None for kind in kinds]
    # Qwen3's mixtures have the field and do not read it: all of their layers have the window.
    first = 0 if model_type == "qwen3_moe" else int(config.get("max_window_layers") or 0)
    return [window if layer >= first else None for layer in range(num_layers)]


def has_windows(config: Mapping[str, Any]) -> bool:
    """Whether any layer looks back a window only, or says that it does.

    Args:
        config: as of `layer_windows`.

    Returns:
        False for a Llama, whose attention asks for no window.
    """
    if config.get("model_type") == "llama":
        return False
    num_layers = int(config.get("num_hidden_layers") or 1)
    return _SLIDING in (config.get("layer_types") or ()) or any(layer_windows(config, num_layers))


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
    if model_type == "mimo_v2_flash" and _SLIDING in (layer_types or LAYER_TYPES):
        return _SINKS  # of its layers with a window
    return _FAMILIES.get(str(model_type))
