"""Bounded waits for something outside this process; a wait that times out raises an error.

`in_thread` runs work whose result another thread waits for, as by `result_within`.
Does not promise: to interrupt a predicate that blocks.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from infra.errors import DeadlineError
from infra.redact import redact

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
ROOM_DEADLINE_S = 1800.0
"""How long a job waits for disk space; shorter than the default deadline of any phase."""
ROOM_POLL_S = 1.0
ANSWER_POLL_S = 1.0
ROOM = "room on the disk of"
"""Start of the wait's description."""

Value = TypeVar("Value")
_log = logging.getLogger(__name__)


def wait_for(
    predicate: Callable[[], Value | None],
    what: str,
    deadline_s: float,
    poll_s: float = 0.1,
) -> Value:
    """Poll until the predicate returns a true value, and return that value.

    Raises:
        DeadlineError: the predicate was still false after `deadline_s`; says `what` it waited for.
    """
    ends_at = time.monotonic() + deadline_s
    while True:
        if value := predicate():
            return value
        if time.monotonic() >= ends_at:
            raise DeadlineError(what, deadline_s)
        time.sleep(poll_s)


def in_thread(work: Callable[[], Value], name: str) -> Future[Value]:
    """Call `work` in a daemon thread, and return the future of its result or error.

    An executor's threads would keep the process from ending while `work` blocks.
    """
    future: Future[Value] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  thread boundary: the future carries it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def result_within(future: Future[Value], what: str, deadline_s: float) -> Value:
    """Wait for a future, and return its result or raise its error.

    Raises:
        DeadlineError: it was not done after `deadline_s`; says `what` it waited for.
    """
    wait([future], deadline_s)
    if not future.done():
        raise DeadlineError(what, deadline_s)
    return future.result()


class Repeated:
    """Calls `work` every `every_s` from a daemon thread, until it returns True or `end` is called.

    Does not promise: to go on after an error of `work`.
    """

    def __init__(self, work: Callable[[], object], every_s: float, name: str) -> None:
        self._ended = threading.Event()

        def run() -> None:
            while not self._ended.wait(every_s):
                if work():
                    return

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def end(self, deadline_s: float = 0.0) -> None:
        """Begin no further call; wait up to `deadline_s` for a call in progress."""
        self._ended.set()
        self._thread.join(deadline_s)


def when_there_is_room(write: Callable[[], Value], what: str) -> Value:
    """Retry a write of `what` (in words) while the disk is full, and return its result.

    Raises:
        DeadlineError: the disk stayed full for `ROOM_DEADLINE_S`; holds the last disk error.
    """
    ends_at = time.monotonic() + ROOM_DEADLINE_S
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            _log.warning("waiting for %s %s: %s", ROOM, what, error)
            if time.monotonic() >= ends_at:
                raise DeadlineError(f"{ROOM} {what} ({error.strerror})", ROOM_DEADLINE_S) from error
        time.sleep(ROOM_POLL_S)


def when_it_answers(ask: Callable[[], Value], what: str, deadline_s: float) -> Value:
    """Retry a call while it raises `OSError`, and return its result; log only the first failure.

    The last error is raised after `deadline_s` of failures. `what` says in words what is called.
    """
    ends_at: float | None = None
    while True:
        try:
            return ask()
        except OSError as error:
            now = time.monotonic()
            if ends_at is None:
                ends_at = now + deadline_s
                said = redact(f"{type(error).__name__}: {error}")
                _log.warning("%s failed (%s); trying for %g s", what, said, deadline_s)
            elif now >= ends_at:
                raise
        time.sleep(min(ANSWER_POLL_S, deadline_s))
