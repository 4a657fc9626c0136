"""The reward contract, and the result of scoring one sample.

A reward function is called with keywords, and may be `async`:

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
        -> float | {"score": float, "pred": str | None, ...}

`engines.rewards.forms` has the other forms. Further numbers are reported next to the score. `pred`
is the extracted answer, None if there was none; evaluation votes by it. `Unscored` is not a score
of 0: a wrong answer earns 0, but a broken reward, a missed deadline or an unreadable ground truth
must not train the model.
"""

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engines.rewards.answers.extraction import ANSWER

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ComputeScore = Callable[..., Any | Awaitable[Any]]

_SHOWN_CHARACTERS = 200
_MAX_ANSWER_CHARACTERS = 1 << 14


@dataclass(frozen=True)
class SampledTokens:
    """What the policy sampled, token by token; T tokens.

    Attributes:
        token_ids: (T,) the completion with the token that ended it; a tuple in a scoring process.
        logprobs: (T,) under the sampling distribution, in nats; a tuple in a scoring process.
        finish_reason: `stop` or `length`.
        num_turns: answers of the policy in this sample.
    """

    prompt_ids: tuple[int, ...]
    token_ids: "tuple[int, ...] | NDArray[np.int32]"
    logprobs: "tuple[float, ...] | NDArray[np.float32]"
    finish_reason: str
    num_turns: int = 1


@dataclass(frozen=True)
class ScoreRequest:
    """One completion to judge.

    Attributes:
        solution_str: the completion's text, without special tokens.
        ground_truth: any JSON value.
        extra_info: a JSON object.
        tokens: None for a text that was not sampled.
        model_score: of the reward model; None without one, or if it did not read the answer.
        judgement: text of the judge; None without one, or if it did not finish.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tokens: SampledTokens | None = None
    model_score: float | None = None
    judgement: str | None = None


@dataclass(frozen=True)
class Score:
    """A finite score, and further values that the function reported.

    Attributes:
        extras: further numbers by name.
        answer: the extracted answer, or its digest if long; empty if none was found; None if the
            function reports none. Ignored by comparisons.
    """

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unscored:
    """No score, which is not a score of 0; `reason` is one line."""

    reason: str


class Judging(Protocol):
    """Judges the requests of one batch as they come, until `results` or `close`; for one thread."""

    def add(self, request: ScoreRequest) -> int:
        """Submit a request; return its number in the batch: 0, 1, ..."""
        ...

    def results(self) -> list[Score | Unscored]:
        """Wait for all results, end the batch, and return one result per request, by number."""
        ...

    def close(self) -> None:
        """Drop what is not judged; callable repeatedly, and after `results`."""
        ...


def interpret(returned: object) -> Score | Unscored:
    """Convert a reward function's return value: a number (also bool, array scalar) or a mapping."""
    extras: dict[str, float] = {}
    answer: str | None = None
    if isinstance(returned, Mapping):
        if "score" not in returned:
            return Unscored("returned a mapping without 'score'")
        for name, value in returned.items():
            number = _number(value)
            if name in ("score", ANSWER):
                continue
            if number is not None and math.isfinite(number):
                extras[str(name)] = number
        answer = _answer(returned)
        returned = returned["score"]
    number = _number(returned)
    if number is None:
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        return Unscored(f"returned {kind}; need a number")
    if not math.isfinite(number):
        return Unscored(f"returned {number}")
    return Score(number, extras, answer)


def describe(error: BaseException) -> str:
    """Return one line for a reward function's exception."""
    text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    return f"raised {type(error).__name__}: {text}" if text else f"raised {type(error).__name__}"


def _answer(returned: Mapping[Any, object]) -> str | None:
    """Return the text of `pred`, or its digest if long; None if it has another type."""
    if ANSWER not in returned:
        return None
    value = returned[ANSWER]
    if value is None:
        return ""
    if isinstance(value, str):
        text = value
    else:
        number = _number(value)
        if number is None:
            return None
        text = f"{number:.17g}"
    # A lone surrogate is valid in a str, but cannot be written to a file.
    text = text.encode("utf-8", "replace").decode("utf-8").strip()
    if len(text) <= _MAX_ANSWER_CHARACTERS:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _number(value: object) -> float | None:
    if not isinstance(value, bool | int | float) and hasattr(value, "item"):
        # A numpy or torch scalar; an array of more than one element is no number.
        try:
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        except (TypeError, ValueError, RuntimeError):
            return None
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
