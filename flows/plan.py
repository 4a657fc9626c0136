"""What a run would do, without doing it: each stage with its fingerprint, and whether it is done.

A `tasks.runner.run.StageRunner` that only looks: below a stage that is not done, fingerprints are
unknown, because they depend on what that stage would yield.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from infra.store.stage_spec import Artifact
from infra.store.storage import Storage
from tasks.runner.identity import StageRequest
from tasks.runner.run import StageResult

Status = Literal["hit", "miss", "unknown"]

_NOT_MADE = Artifact(kind="unknown", uri="", digest="")


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan.

    Attributes:
        label: name within the run.
        status: `hit` is reused, `miss` would run, `unknown` lies below a miss.
        fingerprint: empty while it is unknown.
        inputs: digest by name, empty where it is unknown.
        digest: of the output of a hit, else empty.
    """

    label: str
    status: Status
    fingerprint: str
    inputs: Mapping[str, str]
    digest: str


class Planner:
    """Looks up every stage and remembers what it found.

    Args:
        storage: the store that would be used.
        seed: of the run.
        force: by stage label, a token: only a commit that was made for it is a hit.
    """

    def __init__(self, storage: Storage, seed: int, force: Mapping[str, str]) -> None:
        self._storage = storage
        self.seed = seed
        self._force = force
        self.stages: list[PlannedStage] = []

    @property
    def orchestrated(self) -> bool:
        """A plan is no Prefect run."""
        return False

    @property
    def all_hit(self) -> bool:
        """Whether nothing would run."""
        return all(stage.status == "hit" for stage in self.stages)

    def run(self, request: StageRequest) -> StageResult:
        """Look one stage up; the result of a stage that is not done is a stand-in."""
        inputs = {name: artifact.digest for name, artifact in request.inputs.items()}
        known = all(inputs.values())
        fingerprint = request.fingerprint if known else ""
        record = (
            self._storage.lookup(fingerprint, self._force.get(request.label, "")) if known else None
        )
        artifact = record.artifact if record else _NOT_MADE
        status: Status = "unknown" if not known else "hit" if record else "miss"
        self.stages.append(
            PlannedStage(request.label, status, fingerprint, inputs, artifact.digest)
        )
        return StageResult(
            label=request.label,
            fingerprint=fingerprint,
            artifact=artifact,
            reused=record is not None,
            wall_s=0.0,
            metrics=record.metrics if record else {},
            job_seconds=record.seconds if record else {},
        )
