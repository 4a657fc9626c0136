"""How a command ends when it is told to: once, in order, and whatever is pressed meanwhile.

Promises: Ctrl-C, SIGTERM and a closed terminal raise in the main thread from the first moment on,
so that every `finally` runs; what comes after them does not interrupt the end, which has bounds
of its own, and does not change the exit code that tells of the first.
Does not promise: anything after SIGKILL. Guards and records stand for that.
"""

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType

from infra.errors import EXIT_TERMINATED

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_LIMIT_S = 60.0
"""All ends are bounded to less; who asks again after it was not heard."""
ASK_AGAIN_S = 0.02
IMPORT_SYSTEM = "<frozen importlib"
"""Raised between two lines of it, an exception leaves its lock taken, and every import waits."""


class OrderlyEnd:
    """The signal handler of a command's process."""

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def install(self) -> None:
        """Handle from now on what ends a command; signals that are ignored stay so."""
        sys.unraisablehook = self._repeat
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
                # Python takes its handlers away before it ends; what comes then would kill it.
                atexit.register(signal.signal, number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at < END_LIMIT_S:
            sys.stderr.write("ending already; a moment\n")
            return
        if frame is not None and frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
            _ask_again(number)
            return
        self._asked_at = now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(EXIT_TERMINATED)

    def _repeat(self, ignored: "sys.UnraisableHookArgs") -> None:
        """Raise once more what Python ignored, as in a finalizer or the callback of a weakref."""
        if self._asked_at is not None and ignored.exc_type in {KeyboardInterrupt, SystemExit}:
            self._asked_at = None
            _ask_again(signal.SIGINT if ignored.exc_type is KeyboardInterrupt else signal.SIGTERM)
        else:
            sys.__unraisablehook__(ignored)


def _ask_again(number: int) -> None:
    threading.Timer(ASK_AGAIN_S, os.kill, (os.getpid(), number)).start()
