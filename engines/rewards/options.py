"""`rl.reward.kwargs` of this project's rewards: the arguments that they take. No torch."""

from engines.config.base import StrictModel


class ExactOptions(StrictModel):
    """Of `exact`."""

    answer_delimiter: str | None = None
    """Only what follows its last occurrence is the answer; null takes the row's own."""
    ignore_case: bool = False
    """Compare without regard to case."""


class MathOptions(StrictModel):
    """Of `math`."""

    num_decimals: int = 6
    """Decimals to which two floating-point numbers must agree."""
