"""The main of a scoring process: one JSON line in, one JSON line out.

Started by `engines.rewards.process` only. Promises: whatever the reward function prints goes to
stderr, never into the replies; the process ends when its parent is gone (end of input), and
ends itself shortly after a sample's deadline even if the function never returns to Python (a C
timer, independent of the interpreter lock). Not a sandbox: the function has the rights of the user.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import resource
import sys
from typing import Any, BinaryIO

from engines.rewards.base import ComputeScore, ScoreRequest, Unscored, describe, interpret
from engines.rewards.resolve import load

GRACE_S = 2.0
"""How long after the deadline the process ends itself, should its parent not have ended it."""


def main() -> int:
    """Serve until the input ends."""
    requests, replies = _take_over_pipes()
    setup = json.loads(requests.readline())
    limit = setup["memory_limit_bytes"]
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        function = load(setup["target"])
        _check_arguments(function, setup["kwargs"])
    except BaseException as error:  # noqa: BLE001 - process boundary: reported to the parent
        _reply(replies, {"failed": describe(error)})
        return 1
    _reply(replies, {"ready": True})
    for line in requests:
        faulthandler.dump_traceback_later(setup["timeout_s"] + GRACE_S, exit=True)
        reply = _score(function, json.loads(line), setup["kwargs"])
        faulthandler.cancel_dump_traceback_later()
        _reply(replies, reply)
    return 0


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep stdin and stdout for the protocol; the function sees /dev/null and stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _check_arguments(function: ComputeScore, kwargs: dict[str, Any]) -> None:
    """Refuse a function that no sample can be given to, before there is one: `TypeError`."""
    named = dict.fromkeys(ScoreRequest.__dataclass_fields__)
    try:
        with contextlib.suppress(ValueError):  # a builtin may hide its signature
            inspect.signature(function).bind(**named, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error}; it is called with {', '.join([*named, *kwargs])}") from None


def _score(
    function: ComputeScore, request: dict[str, Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        returned = function(**request, **kwargs)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait_for(returned))
        result = interpret(returned)
    except BaseException as error:  # noqa: BLE001 - process boundary: one sample, reported
        return {"unscored": describe(error)}
    if isinstance(result, Unscored):
        return {"unscored": result.reason}
    return {"score": result.value, "extras": dict(result.extras)}


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main())
