"""Waiting for something outside this process, always with an end.

Promises: a wait that runs out raises an error that says what it waited for.
Does not promise: to interrupt a predicate that itself blocks.
"""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from infra.errors import DeadlineError
from infra.redact import redact

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
ROOM_DEADLINE_S = 1800.0
"""How long a job waits for somebody to free space; less than the progress deadline of any phase."""
ROOM_POLL_S = 1.0
ANSWER_POLL_S = 1.0
ROOM = "room on the disk of"
"""How the wait for it begins, in words."""

Value = TypeVar("Value")
_log = logging.getLogger(__name__)


def wait_for(
    predicate: Callable[[], Value | None],
    what: str,
    deadline_s: float,
    poll_s: float = 0.1,
) -> Value:
    """Poll until the predicate gives something true.

    Args:
        predicate: is called at least once; its exceptions end the wait.
        what: what is waited for, in words, for the error.
        deadline_s: seconds until the wait is given up.
        poll_s: seconds between two calls.

    Returns:
        What the predicate gave.

    Raises:
        DeadlineError: it never gave anything true.
    """
    ends_at = time.monotonic() + deadline_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= ends_at:
            raise DeadlineError(what, deadline_s)
        time.sleep(poll_s)


def when_there_is_room(write: Callable[[], Value], what: str) -> Value:
    """Write to a disk that may be full for a while.

    Args:
        write: called until no full disk stops it; other errors end the wait.
        what: is written, in words.

    Returns:
        What it gave.

    Raises:
        DeadlineError: nobody freed space within `ROOM_DEADLINE_S`; says what the disk said last.
    """
    refusals: list[OSError] = []

    def written() -> tuple[Value] | None:
        try:
            return (write(),)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            _log.warning("waiting for %s %s: %s", ROOM, what, error)
            refusals[:] = [error]
            return None

    try:
        return wait_for(written, f"{ROOM} {what}", ROOM_DEADLINE_S, ROOM_POLL_S)[0]
    except DeadlineError:
        said = f"{ROOM} {what} ({refusals[-1].strerror})"
        raise DeadlineError(said, ROOM_DEADLINE_S) from refusals[-1]


def when_it_answers(ask: Callable[[], Value], what: str, deadline_s: float) -> Value:
    """Ask a disk or a store that may fail for a while; its failing is told once.

    Args:
        ask: called until no `OSError` ends it; other errors end the wait.
        what: is asked, in words.
        deadline_s: how long it may fail, in seconds.

    Returns:
        What it gave.

    Raises:
        OSError: the last one, if it failed for longer.
    """
    ends_at: float | None = None
    while True:
        try:
            return ask()
        except OSError as error:
            now = time.monotonic()
            if ends_at is None:
                ends_at = now + deadline_s
                said = f"{type(error).__name__}: {error}"
                _log.warning("%s failed (%s); trying for %g s", what, redact(said), deadline_s)
            elif now >= ends_at:
                raise
        time.sleep(min(ANSWER_POLL_S, deadline_s))
