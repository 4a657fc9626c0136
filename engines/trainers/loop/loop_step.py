"""The number of a step and its clock."""

from dataclasses import dataclass, field

from engines.trainers.loop.phases import PhaseClock


@dataclass(frozen=True)
class LoopStep:
    """A 1-based step of a stage; `global_number` also counts the rounds before."""

    number: int
    global_number: int
    clock: PhaseClock = field(default_factory=PhaseClock)
