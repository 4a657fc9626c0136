"""Orderly end of a command on Ctrl-C, SIGTERM or a closed terminal (SIGHUP).

Promises: these signals raise in the main thread, so every `finally` runs. If a library swallows or
replaces the exception, it is raised again. Later signals do not interrupt the end for
`END_LIMIT_S`, nor change the exit code of the first. Code under `uninterrupted` runs to its end.
Does not promise: anything after SIGKILL; guards and records cover that.
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
"""Longer than any orderly end; a later signal raises again."""
LOOK_AGAIN_S = 0.05
IMPORT_SYSTEM = "<frozen importlib"  # an exception inside it would leave an import lock held


_scopes: list["OrderlyEnd"] = []


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Scope that must not be left half done: a signal to the main thread raises at its end."""
    if not _scopes or threading.current_thread() is not threading.main_thread():
        yield
        return
    scope = _scopes[-1]
    scope.num_holding += 1
    try:
        yield
    finally:
        scope.num_holding -= 1
        if scope.is_late and not scope.num_holding:
            scope.is_late = False
            raise _end(scope.asked_by)


class OrderlyEnd:
    """Context of a command's main thread, in which the `ENDING` signals raise exceptions.

    Raises:
        KeyboardInterrupt: on SIGINT, also if another exception resulted from it.
        SystemExit: on the other signals, with `EXIT_TERMINATED`.
    """

    def __init__(self) -> None:
        self.asked_by, self._asked_at = 0, 0.0  # first signal and its time
        self._is_look = self._over = self.is_late = False
        self.num_holding = 0

    def __enter__(self) -> Self:
        _scopes.append(self)
        sys.unraisablehook = _without_our_own
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
                # Python removes its handlers before it exits; a signal then would kill it.
                atexit.register(signal.signal, number, signal.SIG_IGN)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        _scopes.remove(self)
        if self.asked_by and isinstance(error, Exception) and _tells_of_an_end(error):
            raise _end(self.asked_by) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_look, self._is_look = self._is_look, False
        if not self.asked_by:
            self.asked_by, self._asked_at = number, now
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
        if self.num_holding:
            self.is_late = True
            return
        raise _end(self.asked_by)

    def _look(self) -> None:
        self._is_look = True
        os.kill(os.getpid(), self.asked_by)


def _end(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_TERMINATED)


def _tells_of_an_end(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__cause__ or error.__context__
    return error is not None


def _without_our_own(ignored: "sys.UnraisableHookArgs") -> None:
    if not issubclass(ignored.exc_type, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(ignored)
