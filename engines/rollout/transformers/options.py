"""`rollout.options` of the engine `transformers`; imported without torch."""

from pydantic import Field

from engines.config.base import StrictModel


class TransformersOptions(StrictModel):
    """`rollout.options` of this engine."""

    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Token budget of one prefill, padding included; a longer prompt is computed alone."""
