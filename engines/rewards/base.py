"""The reward contract: forms of a reward function, its arguments, and the result for one sample.

A reward function has one of three forms, recognized by its parameters, and may be `async`:

    text      compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
    sample    score(sample, **kwargs)                      with `sample` a `ScoreRequest`
    lists     compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)

It is called with keywords and returns a number or `{"score": float, "pred": str | None, ...}`.
Further numbers are reported next to the score. `pred` is the extracted answer, None if there was
none; evaluation votes by it. `text` and `lists` are those of verl's reward managers (`naive` and
`batch`), so such functions run unchanged; `sample` also sees the sampled tokens.
Promises: a function of any form judges one sample per call, in a pool with a deadline; `lists`
gets lists of one. Coroutines run on one event loop per process, so a client with open connections
can be kept; a task that a call leaves behind runs only during later calls. `Unscored` is not a
score of 0: a wrong answer earns 0, but a broken reward, a missed deadline or an unreadable ground
truth must not train the model.
"""

import asyncio
import hashlib
import inspect
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ComputeScore = Callable[..., Any | Awaitable[Any]]

ANSWER = "pred"
"""Key of the extracted answer in a reward function's result, as in verl's `math_dapo`."""
_MAX_ANSWER_CHARACTERS = 1 << 14


@dataclass(frozen=True)
class SampledTokens:
    """A completion of T tokens, as the policy sampled it.

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
        model_score: None without a reward model, or if it did not read the answer.
        judgement: the judge's text; None without a judge, or if it did not finish.
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


def is_correct(score: Score) -> bool:
    """Return True if a score counts as a right answer.

    The verdict `acc` decides if there is one; else a score of at least 1, which every shipped
    reward with a verdict (`RewardRow.is_verdict`) gives only to a right answer.
    """
    return score.extras["acc"] >= 0.5 if "acc" in score.extras else score.value >= 1.0


class Judging(Protocol):
    """Judges a batch's requests as they are added, until `results` or `close`; for one thread."""

    @abstractmethod
    def add(self, request: ScoreRequest) -> int:
        """Submit a request; return its number in the batch: 0, 1, ..."""

    @abstractmethod
    def results(self) -> list[Score | Unscored]:
        """Wait for all results, end the batch, and return one result per request, by number."""

    @abstractmethod
    def close(self) -> None:
        """Drop requests that are not judged yet; callable repeatedly, and after `results`."""


def interpret(returned: object) -> Score | Unscored:
    """Convert a reward function's return value: a number (also bool, array scalar) or a mapping."""
    extras: dict[str, float] = {}
    answer = None
    if isinstance(returned, Mapping):
        if "score" not in returned:
            return Unscored("returned a mapping without 'score'")
        for name, value in returned.items():
            number = None if name in ("score", ANSWER) else _number(value)
            if number is not None and math.isfinite(number):
                extras[str(name)] = number
        answer = _answer(returned[ANSWER]) if ANSWER in returned else None
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
    text = " ".join(str(error).split())[:200]
    return f"raised {type(error).__name__}: {text}" if text else f"raised {type(error).__name__}"


def _answer(value: object) -> str | None:
    """Return the text of `pred`, or its digest if long; None if it has another type."""
    if value is None:
        return ""
    if not isinstance(value, str):
        number = _number(value)
        return None if number is None else f"{number:.17g}"
    # A lone surrogate is valid in a str, but cannot be written to a file.
    text = value.encode("utf-8", "replace").decode("utf-8").strip()
    is_long = len(text) > _MAX_ANSWER_CHARACTERS
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if is_long else text


def _number(value: object) -> float | None:
    if not isinstance(value, bool | int | float) and hasattr(value, "item"):
        # A numpy or torch scalar; an array of more than one element is no number.
        with suppress(TypeError, ValueError, RuntimeError):
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


Form = Literal["text", "sample", "lists"]

EVENT_LOOP = asyncio.Runner()
"""Event loop of this process, created at its first use and ended by `close`."""


def form_of(function: Callable[..., object]) -> Form:
    """Return the form by the names of the parameters; `text` if they are hidden or arbitrary."""
    try:
        names = inspect.signature(function).parameters
    except ValueError:
        return "text"
    if "sample" in names and "solution_str" not in names:
        return "sample"
    return "lists" if "solution_strs" in names else "text"


def arguments(form: Form, request: ScoreRequest) -> dict[str, Any]:
    """Return the function's keywords except its options; ValueError if tokens are missing."""
    if form == "sample":
        if request.tokens is None:
            raise ValueError("the sample has no tokens; need a completion that was sampled")
        return {"sample": request}
    extra_info = dict(request.extra_info)
    if request.tokens is not None:
        extra_info.setdefault("num_turns", request.tokens.num_turns)  # as verl does
    one = {
        "data_source": request.data_source,
        "solution_str": request.solution_str,
        "ground_truth": request.ground_truth,
        "extra_info": extra_info,
    }
    return one if form == "text" else {f"{name}s": [value] for name, value in one.items()}


def judge(
    function: Callable[..., object], form: Form, request: ScoreRequest, kwargs: Mapping[str, Any]
) -> Score | Unscored:
    """Call a function once, awaiting it if needed; its exceptions are not caught."""
    returned = function(**arguments(form, request), **kwargs)
    if inspect.isawaitable(returned):
        returned = EVENT_LOOP.run(_wait_for(returned))
    return result(form, returned)


async def _wait_for(awaitable: Awaitable[object]) -> object:
    return await awaitable


def result(form: Form, returned: object) -> Score | Unscored:
    """Convert a function's return value; for `lists` a sequence of one value."""
    if form != "lists":
        return interpret(returned)
    if hasattr(returned, "tolist"):
        # An array or a tensor.
        returned = returned.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        return Unscored(f"returned {kind}; need a list with one score for each sample")
    if len(returned) != 1:
        return Unscored(f"returned {len(returned)} scores for 1 sample")
    return interpret(returned[0])
