"""What the fault tests have to come to.

A test gives its part with `record_property("F1", number)`. Parts are added up, or, where a number
must not be exceeded, the greatest of them counts.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Figure(NamedTuple):
    """One figure."""

    what: str
    at_least: int | None = None
    """How many there have to be, all parts together."""
    at_most: float | None = None
    """What no part may exceed."""

    def total(self, parts: Iterable[float]) -> float | None:
        """Of all parts; None where no test gave any."""
        numbers = list(parts)
        if not numbers:
            return None
        return sum(numbers) if self.at_least is not None else max(numbers)

    def holds(self, total: float | None) -> bool:
        """Whether it is what it has to be."""
        if total is None:
            return False
        return total >= self.at_least if self.at_least is not None else total <= self.at_most  # type: ignore[operator]

    def line(self, name: str, total: float | None) -> str:
        """As it is printed."""
        need = f">= {self.at_least}" if self.at_least is not None else f"<= {self.at_most:g}"
        shown = "none" if total is None else f"{total:.4g}"
        held = "" if self.holds(total) else "  NOT HELD"
        return f"{name:<4} {shown:>6}  (need {need})  {self.what}{held}"


FIGURES = {
    "F1": Figure("kills at storage calls, after each of which a new process ends identically", 100),
    "F2": Figure("random kills of a pipeline that ends bitwise as if there were none", 20),
    "F3": Figure("metrics lost, doubled or altered by those kills", at_most=0),
    "F4": Figure("seconds to notice a dead rank; a silent one, after its deadline", at_most=5),
    "F5": Figure("cancels at random moments, after each of which nothing is left in 30 s", 10),
    "F6": Figure("numbers that are not finite, on either rank, before which every rank stops", 24),
    "F7": Figure("damaged step checkpoints, each refused with file and digests", 1200),
    "F9": Figure("seconds that a step waited for a tracker that does not answer", at_most=0),
    "F10": Figure("times that ten start a stage at once and one job makes its output", 20),
    "F12": Figure("files of a run that hold a planted secret", at_most=0),
}  # fmt: skip
