"""Main of a scoring process, started by `engines.rewards.process`: JSON lines in and out.

Promises: output of the reward function goes to stderr, never into the replies. The process ends
when its parent is gone (end of input), and shortly after a sample's deadline even if the function
never returns to Python (a C timer, independent of the GIL). Not a sandbox.
"""

import contextlib
import faulthandler
import inspect
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from typing import Any, BinaryIO

from engines.rewards.base import ComputeScore, SampledTokens, ScoreRequest, Unscored, describe
from engines.rewards.forms import EVENT_LOOP, Form, arguments, form_of, judge
from engines.rewards.resolve import load

GRACE_S = 2.0
"""Time after the deadline at which the process ends itself, if its parent has not killed it."""


def main() -> int:
    """Serve until the input ends."""
    requests, replies = _take_over_pipes()
    # Entered before the function's module is loaded, which may ask for the loop.
    with EVENT_LOOP:
        code = _serve(requests, replies)
        # A task that cannot be cancelled or a thread that hangs must not outlive the parent.
        faulthandler.dump_traceback_later(GRACE_S, exit=True)
    return code


def _serve(requests: BinaryIO, replies: BinaryIO) -> int:
    """Load the function and answer every request; return the exit code."""
    setup = json.loads(requests.readline())
    limit = setup["memory_limit_bytes"]
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        function = load(setup["target"])
        form = form_of(function)
        _check_arguments(function, form, setup["kwargs"])
    except BaseException as error:  # noqa: BLE001 - process boundary: reported to the parent
        _reply(replies, {"failed": describe(error)})
        return 1
    _reply(replies, {"ready": True, "form": form, "start_s": time.process_time()})
    for line in requests:
        faulthandler.dump_traceback_later(setup["timeout_s"] + GRACE_S, exit=True)
        reply = _score(function, form, _request_of(json.loads(line)), setup["kwargs"])
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


def message_of(request: ScoreRequest, form: Form) -> dict[str, Any]:
    """Return a request as JSON values; ids and logprobs only for form `sample`."""
    message = {name: getattr(request, name) for name in ScoreRequest.__dataclass_fields__}
    tokens = request.tokens
    if tokens is not None:
        read = form == "sample"
        tokens = SampledTokens(
            tokens.prompt_ids if read else (),
            tuple(map(int, tokens.token_ids)) if read else (),
            tuple(map(float, tokens.logprobs)) if read else (),
            tokens.finish_reason,
            tokens.num_turns,
        )
    return {
        **message,
        "extra_info": dict(request.extra_info),
        "tokens": asdict(tokens) if tokens else None,
    }


def _request_of(message: dict[str, Any]) -> ScoreRequest:
    tokens = message["tokens"]
    if tokens is None:
        return ScoreRequest(**message)
    lists = {name: tuple(tokens[name]) for name in ("prompt_ids", "token_ids", "logprobs")}
    return ScoreRequest(**{**message, "tokens": SampledTokens(**{**tokens, **lists})})


def _check_arguments(function: ComputeScore, form: Form, kwargs: dict[str, Any]) -> None:
    """Raise TypeError if the function does not accept the arguments of its form."""
    some = ScoreRequest("", "", "", tokens=SampledTokens((), (), (), "stop"))
    named = arguments(form, some)
    try:
        with contextlib.suppress(ValueError):  # a builtin may hide its signature
            inspect.signature(function).bind(**named, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error}; it is called with {', '.join([*named, *kwargs])}") from None


def _score(
    function: ComputeScore, form: Form, request: ScoreRequest, kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        found = judge(function, form, request, kwargs)
    except BaseException as error:  # noqa: BLE001 - process boundary: one sample, reported
        return {"unscored": describe(error)}
    if isinstance(found, Unscored):
        return {"unscored": found.reason}
    return {"score": found.value, "extras": dict(found.extras), "answer": found.answer}


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main())
