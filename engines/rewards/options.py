"""`rl.reward.kwargs` of this project's rewards: the arguments that they take. No torch."""

import re
from typing import Literal

from pydantic import Field, model_validator

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
    max_cpu_s: float = Field(default=3.0, gt=0)
    """Processor time for reading and comparing an answer; one that takes longer is wrong, where
    `rl.reward.timeout_s`, by the clock, does not end it before."""


class ModelOptions(StrictModel):
    """Of `model`."""

    threshold: float = 0.0
    """An answer with a larger score counts as right where accuracies are reported."""


class JudgeOptions(StrictModel):
    """Of `judge`."""

    pattern: str | None = None
    """A regular expression whose first group is the number; its last match counts. Null takes the
    last number: 7 of `7/10` and `7 out of 10`; a range, as `4-5`, leaves the sample unscored."""
    scale: float = 1.0
    """The score is the number times it."""
    threshold: float = 0.5
    """An answer with a larger score counts as right where accuracies are reported."""

    @model_validator(mode="after")
    def _check_pattern(self) -> "JudgeOptions":
        if self.pattern is None:
            return self
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern: {error}; need a regular expression") from None
        if not groups:
            raise ValueError("pattern: got one without a group; put the number in parentheses")
        return self


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


class FormatOptions(StrictModel):
    """Of `format`."""

    tags: tuple[str, ...] = ("think", "answer")
    """`<tag>text</tag>` of each, in this order, with white space alone around them."""
    pattern: str | None = None
    """A regular expression that the whole completion has to match, in the place of the tags."""

    @model_validator(mode="after")
    def _check_pattern(self) -> "FormatOptions":
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(
                f"pattern: got {self.pattern!r}; need a regular expression ({error}); repair it"
            ) from None
        return self


class LengthOptions(StrictModel):
    """Of `length`."""

    max_tokens: int = Field(ge=1)
    """From here on a completion earns 0."""
    free_tokens: int = Field(default=0, ge=0)
    """Up to here it earns 1."""
    shape: Literal["linear", "cosine"] = "linear"
    """How it falls between them."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "LengthOptions":
        if self.free_tokens >= self.max_tokens:
            raise ValueError(
                f"free_tokens: got {self.free_tokens}; need less than max_tokens "
                f"{self.max_tokens}; lower it"
            )
        return self


class HttpOptions(StrictModel):
    """Of `http`."""

    url: str = Field(pattern=r"^https?://[^\s@]+$")
    """That takes the POST; without a user or a password in it."""
    token_variable: str | None = None
    """Environment variable with a bearer token, which `rl.reward.environment` names too."""
    max_num_retries: int = Field(default=3, ge=0)
    """After the first try, of a request that failed on the way or was answered 429 or 5xx."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Pause before the first repetition; each further one is twice as long."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """For a connection to stand; the answer has until `rl.reward.timeout_s`."""
