"""Which models the engine `transformers` serves. No torch: the plan asks, and the engine again.

Promises: a model that is refused here would be refused, or computed wrongly, once it is built.
Does not promise that every other one is served; an architecture may keep what the attention
function needs to itself, which the first forward pass finds.
"""

from collections.abc import Mapping
from typing import Any

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model is not served.

    Args:
        config: of a text model, as in `config.json`.

    Returns:
        What it needs and this engine lacks; None where nothing is known against it.
    """
    unknown = sorted(set(config.get("layer_types") or ()) - LAYER_TYPES)
    if unknown:
        return f"layers of type {', '.join(unknown)}"
    if config.get("attn_logit_softcapping"):
        return "attention scores with a soft cap"
    # "vision": between the tokens of an image, of which a text model has none.
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        return "attention to later tokens"
    return None
