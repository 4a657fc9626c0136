"""Wall time of a step or a job by phase; imports no torch."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASE_NOTE = "in phase "
"""Prefix of the exception note that names the phase; the innermost phase comes first."""


@contextmanager
def errors_in(phase: str) -> Iterator[None]:
    """Add a note that names the phase to exceptions raised in the context."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{PHASE_NOTE}{phase}")
        raise


class PhaseClock:
    """Wall seconds by phase; phases may repeat and must not nest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
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
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase so far."""
        return dict(self._seconds)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._started
