"""Where the wall time of a step or a job goes. No torch."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASE_NOTE = "in phase "
"""Begins the note that says in which phase an error was raised; the innermost comes first."""


@contextmanager
def errors_in(phase: str) -> Iterator[None]:
    """Note on what is raised inside the `with` block that it was in `phase`."""
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
        """Count the time inside the `with` block as `phase`, an error's too, which notes it."""
        start = time.perf_counter()
        try:
            with errors_in(phase):
                yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase so far."""
        return dict(self._seconds)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started
