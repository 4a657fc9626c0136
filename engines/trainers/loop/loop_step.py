"""The number of a step and its clock."""

from dataclasses import dataclass, field

from engines.trainers.loop.phases import PhaseClock


@dataclass(frozen=True)
class LoopStep:
    """One step of a training loop.

    Attributes:
        number: within the stage, 1-based.
        global_number: the same, counted over all rounds where the stage is a round of several.
        clock: wall time by phase since the step began.
    """

    number: int
    global_number: int
    clock: PhaseClock = field(default_factory=PhaseClock)
