"""The forms of a reward function, which are recognized by its parameters.

    text      compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
    sample    score(sample, **kwargs)                      with `sample` a `ScoreRequest`
    lists     compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)

`text` and `lists` are those of verl's reward managers (`naive` and `batch`), so such functions run
unchanged; `sample` also sees the sampled tokens.
Promises: a function of any form judges one sample per call, under that sample's deadline; `lists`
gets lists of one. Coroutines run on one event loop per process, so a client with open connections
can be kept. A task that a sample leaves behind may not run between samples.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from engines.rewards.base import Score, ScoreRequest, Unscored, interpret

Form = Literal["text", "sample", "lists"]

EVENT_LOOP = asyncio.Runner()
"""Event loop of this process, created at its first use and ended by `close`."""

NUM_TURNS = "num_turns"
"""Key added to the row's `extra_info`, as verl does."""


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
