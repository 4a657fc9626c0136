"""The reward contract and what scoring one sample can yield.

A reward function is called with keywords, and may be `async`:

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
        -> float | {"score": float, "pred": str | None, ...}

`engines.rewards.forms` has the other forms. Other numbers of a returned mapping are reported next
to the score; `pred` is the answer that was read, None where there was none: evaluation votes by
it. A sample without a usable score is `Unscored`, which is not a score of 0: a wrong answer is the
model's fault and earns 0, a broken reward, a missed deadline or an unreadable ground truth is not
and must not train it.
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
        prompt_ids: of the prompt.
        token_ids: (T,) the completion; the token that ended it is the last one. In the process of a
            reward function a tuple, before that an array.
        logprobs: (T,) of each of them under the sampling distribution, in nats; likewise.
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
        data_source: of the row.
        solution_str: the completion's text, without special tokens.
        ground_truth: of the row; any JSON value.
        extra_info: of the row; a JSON object.
        tokens: of the completion; None for a text that was not sampled.
        model_score: of the reward model; None where there is none, or it did not read the answer.
        judgement: what a judge wrote; None likewise.
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
    """A finite score, and what else the function reported.

    Attributes:
        value: the reward.
        extras: further numbers by name.
        answer: what the function read, or its digest where that is long; empty where it found
            none; None where it does not say. Not compared: it is no part of what a sample is worth.
    """

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unscored:
    """No score; not a score of 0.

    Attributes:
        reason: why, one line.
    """

    reason: str


class Judging(Protocol):
    """What judges the requests of one batch while they come, in this process or in others.

    For one thread; a batch ends with `results` or `close`, and nothing is added after that.
    """

    def add(self, request: ScoreRequest) -> int:
        """Hand over a request; its number in the batch: 0, 1, ..."""
        ...

    def results(self) -> list[Score | Unscored]:
        """Wait for the last result, and end the batch; one result per request, by number."""
        ...

    def close(self) -> None:
        """Give up what is not judged. Harmless when repeated, or after `results`."""
        ...


def interpret(returned: object) -> Score | Unscored:
    """What a reward function's return value means.

    Args:
        returned: a number (bool and array scalars included), or a mapping with `score`; its `pred`
            counts as text, and is no number beside the score.

    Returns:
        The score, or why there is none.
    """
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
    """One line for a reward function's exception."""
    text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    return f"raised {type(error).__name__}: {text}" if text else f"raised {type(error).__name__}"


def _answer(returned: Mapping[Any, object]) -> str | None:
    """The text of `pred`, or its digest where it is long; one of another type is not said."""
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
    # Half a surrogate pair is text for Python, and for no file.
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
