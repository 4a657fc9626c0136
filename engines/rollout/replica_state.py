"""The states of a replica and the transitions between them.

HEALTHY     serves the published weights
SUSPECT     did not answer in time; keeps its samples, gets no new ones
DEAD        its process ended, or it was silent for too long; its samples are redone
RESTARTING  another replica starts in its place
STALE       is up, without the published weights; gets no requests
"""

from dataclasses import dataclass, field
from enum import Enum

from engines.rollout.base import RolloutEngine


class ReplicaState(Enum):
    """State of a replica; explained in the module docstring."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"
    RESTARTING = "RESTARTING"
    STALE = "STALE"


_S = ReplicaState
TRANSITIONS: dict[tuple[ReplicaState, ReplicaState], str] = {
    (_S.HEALTHY, _S.SUSPECT): "it leaves a question about its health unanswered",
    (_S.SUSPECT, _S.HEALTHY): "it answers",
    (_S.SUSPECT, _S.STALE): "it is put to sleep, or new weights are about to be published",
    (_S.HEALTHY, _S.STALE): "it is put to sleep, or new weights are about to be published",
    (_S.HEALTHY, _S.DEAD): "its process ended",
    (_S.SUSPECT, _S.DEAD): "its process ended, or it was silent for `rollout.silence_s`",
    (_S.STALE, _S.DEAD): "its process ended, or it did not take the weights by the deadline",
    (_S.DEAD, _S.RESTARTING): "`rollout.max_num_restarts` allows one more; else the stage ends",
    (_S.RESTARTING, _S.STALE): "it is up",
    (_S.RESTARTING, _S.DEAD): "it ended while it started",
    (_S.STALE, _S.HEALTHY): "it confirmed the weights and their digest, and passed the probe",
}
"""All allowed transitions and their reasons; shown in `docs/operate.md`."""


@dataclass
class ReplicaSlot:
    """A numbered place for a replica; its `engine` is not usable in DEAD and RESTARTING.

    Attributes:
        num_in_flight: samples that were sent to it and are not answered.
        last_answer_s: `time.monotonic` of its last sign of life while it was watched.
    """

    place: int
    engine: RolloutEngine
    state: ReplicaState = field(default=ReplicaState.STALE)
    num_in_flight: int = 0
    last_answer_s: float = 0.0

    @property
    def is_up(self) -> bool:
        """True if there is an engine to call."""
        return self.state not in (ReplicaState.DEAD, ReplicaState.RESTARTING)

    def move(self, to: ReplicaState) -> None:
        """Go to another state; a ValueError if the transition is not allowed."""
        if to is self.state:
            return
        if (self.state, to) not in TRANSITIONS:
            raise ValueError(f"replica {self.place}: no step from {self.state} to {to}")
        self.state = to
