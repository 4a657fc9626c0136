"""Waiting for something outside this process, always with an end.

Promises: a wait that runs out raises an error that says what it waited for.
Does not promise: to interrupt a predicate that itself blocks.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from infra.errors import DeadlineError

Value = TypeVar("Value")


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
