"""Wall time of a step or a job by phase; imports no torch."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

PHASE_NOTE = "in phase "
"""Prefix of the exception note that names the phase; the innermost phase comes first."""


def note_phase(phase: str, _: object, error: BaseException | None, __: object) -> None:
    """Add a note that names the phase to an error; has the arguments of an `__exit__`."""
    # A signal to end the process is no error.
    if isinstance(error, Exception):
        error.add_note(f"{PHASE_NOTE}{phase}")


@contextmanager
def errors_in(phase: str) -> Iterator[None]:
    """Add a note that names the phase to exceptions raised in the context."""
    with ExitStack() as stack:
        stack.push(partial(note_phase, phase))
        yield


class PhaseClock:
    """Wall seconds by phase, in `seconds`; phases may repeat and must not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time in the context as `phase`, also if it raises; the error gets a note."""
        start = time.perf_counter()
        try:
            with errors_in(phase):
                yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._started
