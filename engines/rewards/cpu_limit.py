"""Limit of a computation by processor time, so that a busy machine does not change the result.

Does not interrupt a single C call that checks no signals, nor code outside the main thread, where
Python receives none; the sample's deadline applies there.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_REPEAT_S = 0.5
"""Interval of further attempts, in case the first exception is swallowed."""


class CpuLimitError(BaseException):
    """The processor time is used up; a BaseException, which `except Exception` does not catch."""


@contextlib.contextmanager
def cpu_limit(max_cpu_s: float) -> Iterator[None]:
    """Raise CpuLimitError in the body after `max_cpu_s` seconds of this process's CPU time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_running = True

    def end(_signal: int, _frame: FrameType | None) -> None:
        if is_running:
            raise CpuLimitError

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s, _REPEAT_S)
        yield
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
