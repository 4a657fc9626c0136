"""Which models the engine `transformers` serves; imported without torch, also by the planner.

A refused model would fail or be computed wrongly; the first forward pass may refuse others.
"""

from collections.abc import Mapping
from typing import Any

from engines.attention_needs import unusual_attention


def refusal(config: Mapping[str, Any]) -> str | None:
    """Return what a model (given its `config.json`) needs and this engine lacks, or None."""
    model_type = config.get("model_type")
    if model_type == "diffllama":
        return "layers that attend twice"
    if model_type == "moshi" and config.get("sliding_window", True):
        return "a window that its attention is not told of"
    return unusual_attention(config)
