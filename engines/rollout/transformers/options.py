"""Options of the engine `transformers`, and the models that it refuses; imported without torch.

A refused model would fail or be computed wrongly; the first forward pass may refuse others.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from engines.attention_needs import unusual_attention
from engines.config.base import StrictModel


class TransformersOptions(StrictModel):
    """`rollout.options` of this engine."""

    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Token budget of one prefill, padding included; a longer prompt is computed alone."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values in bytes; null: no limit on a CPU, else 80 % of what is free when
    sampling begins. Samples that find no room wait."""
    enforce_eager: bool = False
    """Launch the kernels of a decode step one by one; else NVIDIA GPUs replay recorded steps."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """Return what a model (given its `config.json`) needs and this engine lacks, or None."""
    model_type = config.get("model_type")
    if model_type == "diffllama":
        return "layers that attend twice"
    if model_type == "moshi" and config.get("sliding_window", True):
        return "a window that its attention is not told of"
    return unusual_attention(config)
