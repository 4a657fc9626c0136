"""Which models the engine `transformers` serves. No torch: the plan asks, and the engine again.

Promises: a model that is refused here would be refused, or computed wrongly, once it is built.
Does not promise that every other one is served; an architecture may keep what the attention
function needs to itself, which the first forward pass finds.
"""

from collections.abc import Mapping
from typing import Any

from engines.attention_needs import unusual_attention


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model is not served.

    Args:
        config: of a text model, as in `config.json`.

    Returns:
        What it needs and this engine lacks; None where nothing is known against it.
    """
    model_type = config.get("model_type")
    if model_type == "diffllama":
        return "layers that attend twice"
    if model_type == "moshi" and config.get("sliding_window", True):
        return "a window that its attention is not told of"
    return unusual_attention(config)
