"""The health of one replica: the states it passes through, and what leads from one to the next.

HEALTHY     serves the published weights
SUSPECT     did not answer in time; keeps what it has, gets nothing new
DEAD        its process ended, or it was silent for too long; ended, its samples are redone
RESTARTING  another one starts in its place
STALE       is up, without the published weights; gets nothing
"""

from dataclasses import dataclass, field
from enum import Enum

from engines.rollout.base import RolloutEngine


class ReplicaState(Enum):
    """See the module."""

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
"""Every step there is, and its reason; `docs/operate.md` shows it."""


@dataclass
class ReplicaSlot:
    """A place for a replica.

    Attributes:
        place: its number.
        engine: what serves there; of no use in DEAD and RESTARTING.
        state: as in the module.
        num_in_flight: samples it was given and has not answered.
        last_answer_s: `time.monotonic` of its last sign of life while it was watched.
    """

    place: int
    engine: RolloutEngine
    state: ReplicaState = field(default=ReplicaState.STALE)
    num_in_flight: int = 0
    last_answer_s: float = 0.0

    @property
    def is_up(self) -> bool:
        """Whether there is an engine to talk to."""
        return self.state not in (ReplicaState.DEAD, ReplicaState.RESTARTING)

    def move(self, to: ReplicaState) -> None:
        """Go to another state; staying is no step.

        Args:
            to: the state.

        Raises:
            ValueError: no such step.
        """
        if to is self.state:
            return
        if (self.state, to) not in TRANSITIONS:
            raise ValueError(f"replica {self.place}: no step from {self.state} to {to}")
        self.state = to
