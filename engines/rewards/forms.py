"""The forms that a reward function may have; its parameters say which it is.

    text      compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
    sample    score(sample, **kwargs)                      with `sample` a `ScoreRequest`
    lists     compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)

`text` and `lists` are those of verl's reward managers (`naive` and `batch`), so that such functions
run unchanged; `sample` sees what was sampled, token by token.
Promises: whatever its form, a function judges one sample a call, under that sample's deadline; one
of `lists` gets lists of one. What is awaited runs on one event loop, the same for every sample of
the process: a client with open connections may be kept from one to the next.
Does not promise: that a task which a sample leaves behind goes on between two samples.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from engines.rewards.base import Score, ScoreRequest, Unscored, interpret

Form = Literal["text", "sample", "lists"]

EVENT_LOOP = asyncio.Runner()
"""Of this process; its loop is made when it is first used or entered, and ends with `close`."""

NUM_TURNS = "num_turns"
"""What `extra_info` tells beside what the row says, as verl's does."""


def form_of(function: Callable[..., object]) -> Form:
    """The form of a function, by the names of its parameters.

    Args:
        function: a reward function.

    Returns:
        Its form; `text` of a builtin that hides its parameters, or of one that takes any.
    """
    try:
        names = inspect.signature(function).parameters
    except ValueError:
        return "text"
    if "sample" in names and "solution_str" not in names:
        return "sample"
    return "lists" if "solution_strs" in names else "text"


def arguments(form: Form, request: ScoreRequest) -> dict[str, Any]:
    """The keywords that a function of a form is called with, beside its own options.

    Args:
        form: of the function.
        request: what it shall judge.

    Returns:
        Values by keyword.

    Raises:
        ValueError: the function wants to see the tokens of a text that was not sampled.
    """
    if form == "sample":
        if request.tokens is None:
            raise ValueError("the sample has no tokens; need a completion that was sampled")
        return {"sample": request}
    extra_info = dict(request.extra_info)
    if request.tokens is not None:
        extra_info.setdefault(NUM_TURNS, request.tokens.num_turns)
    one = {
        "data_source": request.data_source,
        "solution_str": request.solution_str,
        "ground_truth": request.ground_truth,
        "extra_info": extra_info,
    }
    if form == "text":
        return one
    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    return {name: [value] for name, value in zip(names, one.values(), strict=True)}


def judge(
    function: Callable[..., object], form: Form, request: ScoreRequest, kwargs: Mapping[str, Any]
) -> Score | Unscored:
    """Call a function once; it may be `async`.

    Args:
        function: a reward function.
        form: of the function.
        request: what it shall judge.
        kwargs: its own options.

    Returns:
        The score, or why there is none; what the function raises, it raises.
    """
    returned = function(**arguments(form, request), **kwargs)
    if inspect.isawaitable(returned):
        returned = EVENT_LOOP.run(_wait_for(returned))
    return result(form, returned)


async def _wait_for(awaitable: Awaitable[object]) -> object:
    return await awaitable


def result(form: Form, returned: object) -> Score | Unscored:
    """What a function's return value means.

    Args:
        form: of the function.
        returned: as of `interpret`; of `lists`, a sequence of one such value.

    Returns:
        The score, or why there is none.
    """
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
