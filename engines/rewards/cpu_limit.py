"""An end to a computation by the processor's time that it takes, not by the clock.

Promises: a busy machine does not change what ends; the limit is the same for whoever runs alone.
Does not promise: an end inside one call of C that looks for no signal, nor any limit outside the
main thread, where Python receives none: the sample's deadline is that.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_REPEAT_S = 0.5
"""The next attempts, should the first fall where exceptions are swallowed."""


class CpuLimitError(BaseException):
    """The computation took its time; no `except Exception` on its way stops it."""


@contextlib.contextmanager
def cpu_limit(max_cpu_s: float) -> Iterator[None]:
    """Raise in the body when it has used its time.

    Args:
        max_cpu_s: processor time of this process, in seconds.

    Raises:
        CpuLimitError: the time is over.
    """
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
