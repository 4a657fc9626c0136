"""One scoring process: its parent's view of it, its main program, and the JSON lines between them.

`python -m engines.rewards.process` is the child; `ScoringProcess` starts it.
Promises: no call of the parent blocks on the pipes. `failure` tells when the process must be ended,
and `kill` ends its whole process group. The caller owns the selector and polls it. In the child,
output of the reward function goes to stderr, never into the replies. The child ends when its parent
is gone (end of input), and shortly after a sample's deadline even if the function never returns to
Python (a C timer, independent of the GIL).
Does not promise: a sandbox.
"""

import contextlib
import faulthandler
import inspect
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from engines.rewards.base import (
    EVENT_LOOP,
    ComputeScore,
    Form,
    SampledTokens,
    Score,
    ScoreRequest,
    Unscored,
    arguments,
    describe,
    form_of,
    judge,
)
from engines.rewards.resolve import load
from infra.redact import environment_of_user_code

_START_DEADLINE_S = 120.0
_END_DEADLINE_S = 5.0
_MAX_REPLY_BYTES = 1 << 20
_PIPE_BYTES = 1 << 16


@dataclass(frozen=True)
class WorkerSetup:
    """First message to a scoring process.

    Attributes:
        target: the reward function, see `engines.rewards.resolve.load`.
        memory_limit_bytes: limit of the process's address space, or None.
        environment: names of secret environment variables that the function may see.
    """

    target: str
    kwargs: Mapping[str, Any]
    timeout_s: float
    memory_limit_bytes: int | None
    environment: tuple[str, ...] = ()


class ScoringProcess:
    """One scoring process, with at most one request in flight; `selector` watches its pipes.

    Attributes:
        form: form of the function; None until it is ready.
        start_s: processor time to load the function; None until then.
    """

    def __init__(self, setup: WorkerSetup, selector: selectors.BaseSelector) -> None:
        self._timeout_s = setup.timeout_s
        self._selector = selector
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            env=environment_of_user_code(setup.environment, OMP_NUM_THREADS="1"),
        )
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        assert self._process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        selector.register(self._stdout, selectors.EVENT_READ, self)
        self.start_s: float | None = None
        self.index: int | None = None
        self.num_judged = 0
        self._timed_s = 0.0
        self._submitted_s = 0.0
        self._outgoing = memoryview(b"")
        self._incoming = b""
        self.form: Form | None = None
        self._ended = False
        self._broken: str | None = None
        self._results: list[tuple[int, Score | Unscored]] = []
        self._deadline = time.monotonic() + _START_DEADLINE_S
        self._send(asdict(setup))

    @property
    def is_idle(self) -> bool:
        """True if it can take a request."""
        return self.form is not None and self.index is None and self._broken is None

    def submit(self, index: int, request: ScoreRequest) -> None:
        """Submit a request to an idle process; `index` comes back with the result."""
        self.index = index
        self._submitted_s = time.monotonic()
        self._deadline = self._submitted_s + self._timeout_s
        self._send(message_of(request, self.form or "text"))

    @property
    def timed_s(self) -> float:
        """Seconds spent on requests so far, without the first one, which includes imports."""
        timed = self.index is not None and self.num_judged > 0
        return self._timed_s + (time.monotonic() - self._submitted_s if timed else 0.0)

    def seconds_left(self) -> float:
        """Return the time until its deadline; infinite while idle."""
        return float("inf") if self.is_idle else self._deadline - time.monotonic()

    def failure(self) -> str | None:
        """Return why the process must be ended, or None."""
        overdue = not self.is_idle and time.monotonic() >= self._deadline
        exited = self._process.poll() is not None
        if exited or overdue:
            while not self._ended and self._broken is None and self.read():
                pass
            overdue = overdue and not self.is_idle
        if self._broken is not None:
            return self._broken
        if self._ended or exited:
            return f"the scoring process ended with code {self._wait()}"
        if overdue and self.form is None:
            return f"the scoring process was not ready after {_START_DEADLINE_S:g} s"
        return f"missed the deadline of {self._timeout_s:g} s" if overdue else None

    def take_results(self) -> list[tuple[int, Score | Unscored]]:
        """Return (index, result) of what arrived since the last call."""
        results, self._results = self._results, []
        return results

    def write(self) -> None:
        """Write as much of the request as the pipe takes."""
        try:
            written = os.write(self._stdin.fileno(), self._outgoing[:_PIPE_BYTES])
        except BlockingIOError:
            return
        except BrokenPipeError:
            written = len(self._outgoing)
        self._outgoing = self._outgoing[written:]
        watched = self._stdin.fileno() in self._selector.get_map()
        if self._outgoing and not watched:
            self._selector.register(self._stdin, selectors.EVENT_WRITE, self)
        elif watched and not self._outgoing:
            self._selector.unregister(self._stdin)

    def read(self) -> bool:
        """Read what has arrived; return True if there was anything."""
        try:
            data = os.read(self._stdout.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._ended = True
            self._selector.unregister(self._stdout)
            return False
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            self._receive(line)
        if len(self._incoming) > _MAX_REPLY_BYTES:
            self._broken = f"the reply is longer than {_MAX_REPLY_BYTES} bytes"
        return True

    def kill(self) -> None:
        """Kill the process and its process group."""
        for pipe in (self._stdin, self._stdout):
            if not pipe.closed and pipe.fileno() in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._outgoing = memoryview(bytes(self._outgoing) + json.dumps(message).encode() + b"\n")
        self.write()

    def _receive(self, line: bytes) -> None:
        reply: dict[str, Any]
        try:
            reply = json.loads(line)
        except ValueError:
            reply = {"failed": "the scoring process sent something that is not a reply"}
        if "failed" in reply:
            self._broken = reply["failed"]
        elif "ready" in reply:
            self.form, self.start_s = reply["form"], reply["start_s"]
        elif self.index is not None:
            result = (
                Unscored(str(reply["unscored"]))
                if "unscored" in reply
                else Score(reply["score"], reply["extras"], reply["answer"])
            )
            self._results.append((self.index, result))
            self._timed_s = self.timed_s
            self.num_judged += 1
            self.index = None

    def _wait(self) -> int | None:
        try:
            return self._process.wait(timeout=_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return None


GRACE_S = 2.0
"""Time after the deadline at which the process ends itself, if its parent has not killed it."""


def main() -> int:
    """Serve until the input ends."""
    # The protocol keeps stdin and stdout; the function sees /dev/null and stderr.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
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
        reply = _score(function, form, json.loads(line), setup["kwargs"])
        faulthandler.cancel_dump_traceback_later()
        _reply(replies, reply)
    return 0


def message_of(request: ScoreRequest, form: Form) -> dict[str, Any]:
    """Return a request as JSON values; ids and logprobs only for form `sample`."""
    message = {**vars(request), "extra_info": dict(request.extra_info)}
    if (tokens := request.tokens) is not None:
        read = form == "sample"
        message["tokens"] = {
            "prompt_ids": tokens.prompt_ids if read else (),
            "token_ids": tuple(map(int, tokens.token_ids)) if read else (),
            "logprobs": tuple(map(float, tokens.logprobs)) if read else (),
            "finish_reason": tokens.finish_reason,
            "num_turns": tokens.num_turns,
        }
    return message


def _check_arguments(function: ComputeScore, form: Form, kwargs: dict[str, Any]) -> None:
    """Raise TypeError if the function does not accept the arguments of its form."""
    named = arguments(form, ScoreRequest("", "", "", tokens=SampledTokens((), (), (), "stop")))
    try:
        with contextlib.suppress(ValueError):  # a builtin may hide its signature
            inspect.signature(function).bind(**named, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error}; it is called with {', '.join([*named, *kwargs])}") from None


def _score(
    function: ComputeScore, form: Form, message: dict[str, Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    if tokens := message["tokens"]:
        lists = {name: tuple(tokens[name]) for name in ("prompt_ids", "token_ids", "logprobs")}
        message["tokens"] = SampledTokens(**{**tokens, **lists})
    try:
        found = judge(function, form, ScoreRequest(**message), kwargs)
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
