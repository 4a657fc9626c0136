"""What a recipe in a published size has to reach."""

from pydantic import Field

from engines.config.base import StrictModel


class TargetConfig(StrictModel):
    """What others published for the recipe's setting; no stage reads it and nothing is gated by it.

    The gate in front of the registry is `promote`.
    """

    metric: str = Field(min_length=1)
    """Metric of the final evaluation, as `promote.metric` names it."""
    data_set: str = Field(min_length=1)
    """The data set, and which part of it."""
    value: float | None = None
    """What was published, a share for accuracies; null: the source gives only a curve or words."""
    source: str = Field(min_length=1)
    """Paper or page, and the place in it."""
