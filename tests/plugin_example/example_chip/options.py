"""Options of the plugin's parts, apart from them: the plan validates them without torch."""

from pydantic import Field

from engines.config.base import StrictModel


class ExampleOptions(StrictModel):
    """`training.options` of the backend example_engine."""

    bucket_size_mb: int = Field(default=64, ge=1)
    """Gradients that travel in one collective, in MB of 10**6 bytes."""


class ClippedOptions(StrictModel):
    """`rl.algorithm.options` of the loss example_loss."""

    max_ratio: float = Field(default=2.0, gt=1)
    """The ratio to the old policy counts up to here."""
