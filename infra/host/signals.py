"""How a command ends when it is told to: once, in order, and whatever is pressed meanwhile.

Promises: Ctrl-C, SIGTERM and a closed terminal raise in the main thread from the first moment on,
so that every `finally` runs; where a library swallows or replaces that exception, it is raised
again; what comes after it does not interrupt the end, which has bounds of its own, and does not
change the exit code that tells of the first. What is done under `uninterrupted` is done whole.
Does not promise: anything after SIGKILL. Guards and records stand for that.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self

from infra.errors import EXIT_TERMINATED

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_LIMIT_S = 60.0
"""All ends are bounded to less; who asks again after it was not heard."""
LOOK_AGAIN_S = 0.05
IMPORT_SYSTEM = "<frozen importlib"
"""Raised between two lines of it, an exception leaves its lock taken, and every import waits."""


_scopes: list["OrderlyEnd"] = []
"""Of this process, the innermost last."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Scope that has bounds of its own, and that half done is worse than late.

    A signal that comes inside it raises at its end. Nothing happens to other threads, where no
    signal raises, nor outside of `OrderlyEnd`.

    Yields:
        None: inside the scope.
    """
    if not _scopes or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _scopes[-1].held_back():
        yield


class OrderlyEnd:
    """Around all that a command does in its main thread: handles what ends it.

    Raises:
        KeyboardInterrupt: on SIGINT, also where another exception came out of it.
        SystemExit: on the others, with `EXIT_TERMINATED`.
    """

    def __init__(self) -> None:
        self._asked_by = 0
        self._asked_at = 0.0
        self._is_look = False
        self._over = False
        self._num_holding = 0
        self._is_late = False

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """What `uninterrupted` enters."""
        self._num_holding += 1
        try:
            yield
        finally:
            self._num_holding -= 1
            if self._is_late and not self._num_holding:
                self._is_late = False
                raise _end(self._asked_by)

    def __enter__(self) -> Self:
        """Handle from now on what ends a command; signals that are ignored stay so."""
        _scopes.append(self)
        sys.unraisablehook = _without_our_own
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
                # Python takes its handlers away before it ends; what comes then would kill it.
                atexit.register(signal.signal, number, signal.SIG_IGN)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell of the signal, not of what a library made of its exception."""
        self._over = True
        _scopes.remove(self)
        if self._asked_by and isinstance(error, Exception) and _tells_of_an_end(error):
            raise _end(self._asked_by) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_look, self._is_look = self._is_look, False
        if not self._asked_by:
            self._asked_by, self._asked_at = number, now
        elif not is_look and now - self._asked_at < END_LIMIT_S:
            sys.stderr.write("ending already; a moment\n")
            return
        if self._over:
            return
        timer = threading.Timer(LOOK_AGAIN_S, self._look)
        timer.daemon = True
        timer.start()
        is_importing = frame is not None and frame.f_code.co_filename.startswith(IMPORT_SYSTEM)
        if is_importing or (is_look and _tells_of_an_end(sys.exception())):
            return
        if self._num_holding:
            self._is_late = True
            return
        raise _end(self._asked_by)

    def _look(self) -> None:
        """Have the main thread see whether it ends: only there it can be known."""
        self._is_look = True
        os.kill(os.getpid(), self._asked_by)


def _end(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_TERMINATED)


def _tells_of_an_end(error: BaseException | None) -> bool:
    """Whether an exception ends the command, or came of one that did."""
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__cause__ or error.__context__
    return error is not None


def _without_our_own(ignored: "sys.UnraisableHookArgs") -> None:
    """What Python tells of exceptions that it ignores, but for those that are raised again."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(ignored)
