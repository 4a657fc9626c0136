"""`rl.reward.kwargs` of this project's rewards: the arguments that they take. No torch."""

from typing import Literal

from engines.config.base import StrictModel


class ExactOptions(StrictModel):
    """Of `exact`."""

    answer_delimiter: str | None = None
    """Only what follows its last occurrence is the answer; null takes the row's own."""
    ignore_case: bool = False
    """Compare without regard to case."""


class MathOptions(StrictModel):
    """Of `math`."""

    extraction: Literal["any", "boxed", "hash", "answer", "last_number"] = "any"
    """Where the answer stands: `\\boxed{}`, behind `####`, behind `Answer:`, or the last number;
    `any` takes a box before anything else that can be parsed."""
    num_decimals: int = 6
    """Decimals to which two floating-point numbers must agree."""


class Gsm8kOptions(StrictModel):
    """Of `gsm8k`."""

    method: Literal["strict", "flexible"] = "strict"
    """The last number behind `#### ` without its commas, or the last number as it stands."""
    format_score: float = 0.0
    """Of a wrong number."""
    score: float = 1.0
    """Of the right one."""


class MathDapoOptions(StrictModel):
    """Of `math_dapo`."""

    strict_box_verify: bool = False
    """The answer is what the last box holds, and has to be the same text."""
