"""How a command ends when it is told to: once, in order, and whatever is pressed meanwhile.

Promises: Ctrl-C, SIGTERM and a closed terminal raise in the main thread from the first moment on,
so that every `finally` runs; what comes after them does not interrupt the end, which has bounds
of its own.
Does not promise: anything after SIGKILL. Guards and records stand for that.
"""

import signal
import sys
import time
from types import FrameType

from infra.errors import EXIT_TERMINATED

END_LIMIT_S = 60.0
"""All ends are bounded to less; who asks again after it was not heard."""


class OrderlyEnd:
    """The signal handler of a command's process."""

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def install(self) -> None:
        """Handle from now on what ends a command; signals that are ignored stay so."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (Python's signature)
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at < END_LIMIT_S:
            sys.stderr.write("ending already; a moment\n")
            return
        self._asked_at = now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(EXIT_TERMINATED)
