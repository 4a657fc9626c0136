"""`rl.reward.kwargs` of the built-in rewards. No torch."""

import re
from typing import Literal

from pydantic import Field

from engines.config.base import Refusals, StrictModel


class ExactOptions(StrictModel):
    """Options of reward `exact`."""

    answer_delimiter: str | None = None
    """Only the text after its last occurrence is the answer; null uses the row's `extra_info`."""
    ignore_case: bool = False
    """Compare without regard to case."""


class MathOptions(StrictModel):
    """Options of reward `math`."""

    extraction: Literal["any", "boxed", "hash", "answer", "last_number"] = "any"
    r"""Place of the answer: `\boxed{}`, after `####`, after `Answer:`, or the last number; `any`
    prefers a box to anything else that can be parsed."""
    num_decimals: int = 6
    """Decimals to which two floating-point numbers must agree."""
    max_cpu_s: float = Field(default=3.0, gt=0)
    """Processor time in seconds for an answer, which is wrong if it takes longer;
    `rl.reward.timeout_s` limits the wall time."""


class ModelOptions(StrictModel):
    """Options of reward `model`."""

    threshold: float = 0.0
    """An answer with a larger score counts as right in accuracies."""


class JudgeOptions(StrictModel):
    """Options of reward `judge`."""

    pattern: str | None = None
    """A regular expression whose first group is the number; its last match counts. Null takes the
    last number: 7 of `7/10`; a range such as `4-5` leaves the sample unscored."""
    scale: float = 1.0
    """Factor from the judge's number to the score."""
    threshold: float = 0.5
    """An answer with a larger score counts as right in accuracies."""

    def _refusals(self) -> Refusals:
        yield from _not_compiled(self.pattern or "")
        yield (
            self.pattern is not None and not re.compile(self.pattern).groups,
            "pattern: got one without a group; put parentheses around the part for the number",
        )


class Gsm8kOptions(StrictModel):
    """Options of reward `gsm8k`."""

    method: Literal["strict", "flexible"] = "strict"
    """The last number after `#### ` without its commas, or the last number unchanged."""
    format_score: float = 0.0
    """Score of a wrong number."""
    score: float = 1.0
    """Score of the right number."""


class MathDapoOptions(StrictModel):
    """Options of reward `math_dapo`."""

    strict_box_verify: bool = False
    """Take the answer from the last box, and compare it without normalisation."""


class FormatOptions(StrictModel):
    """Options of reward `format`."""

    tags: tuple[str, ...] = ("think", "answer")
    """Each must occur once as `<tag>text</tag>`, in this order, with white space alone around."""
    pattern: str | None = None
    """A regular expression that the whole completion must match; replaces the tags."""

    def _refusals(self) -> Refusals:
        yield from _not_compiled(self.pattern or "")


class LengthOptions(StrictModel):
    """Options of reward `length`."""

    max_tokens: int = Field(ge=1)
    """A completion of this length or longer earns 0."""
    free_tokens: int = Field(default=0, ge=0)
    """A completion up to this length earns 1."""
    shape: Literal["linear", "cosine"] = "linear"
    """How the reward falls between the two lengths."""

    def _refusals(self) -> Refusals:
        yield (
            self.free_tokens >= self.max_tokens,
            f"free_tokens: got {self.free_tokens}; need less than max_tokens "
            f"{self.max_tokens}; lower it",
        )


class HttpOptions(StrictModel):
    """Options of reward `http`."""

    url: str = Field(pattern=r"^https?://[^\s@]+$")
    """URL of the POST, without a user or a password."""
    token_variable: str | None = None
    """Environment variable with a bearer token; must also be listed in `rl.reward.environment`."""
    max_num_retries: int = Field(default=3, ge=0)
    """Retries of a request that failed in transport or was answered 429 or 5xx."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Pause in seconds before the first retry; doubles with each further one."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Limit in seconds to connect; the answer has until `rl.reward.timeout_s`."""


def _not_compiled(pattern: str) -> Refusals:
    try:
        re.compile(pattern)
    except re.error as error:
        yield True, f"pattern: got {pattern!r}; need a regular expression ({error}); repair it"
