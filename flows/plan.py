"""What a run would do, without doing it: each stage with its fingerprint, and whether it is done.

A `tasks.runner.run.StageRunner` that only looks: below a stage that is not done, fingerprints are
unknown, because they depend on what that stage would yield.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import Storage
from tasks.runner.adoption import find_adoptable, half_trained
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
        adoption: whose half-trained work a hit continued, or a miss could; else empty.
    """

    label: str
    status: Status
    fingerprint: str
    inputs: Mapping[str, str]
    digest: str
    adoption: str = ""


class Planner:
    """Looks up every stage and remembers what it found.

    Args:
        storage: the store that would be used.
        seed: of the run.
        force: by stage label, a token: only a commit that was made for it is a hit.
        adopt: labels of stages that must find something to adopt if they are no hits.
    """

    def __init__(
        self,
        storage: Storage,
        seed: int,
        force: Mapping[str, str],
        adopt: Collection[str] = (),
    ) -> None:
        self._storage = storage
        self.seed = seed
        self._force, self._adopt = force, adopt
        self.stages: list[PlannedStage] = []

    @property
    def all_hit(self) -> bool:
        """Whether nothing would run."""
        return all(stage.status == "hit" for stage in self.stages)

    def run(self, request: StageRequest) -> StageResult:
        """Look one stage up; the result of a stage that is not done is a stand-in.

        Args:
            request: the stage.

        Returns:
            What is known of its result.

        Raises:
            ConfigError: the stage is to adopt something, and there is nothing that it may.
        """
        inputs = {name: artifact.digest for name, artifact in request.inputs.items()}
        known = all(inputs.values())
        fingerprint = request.fingerprint if known else ""
        record = (
            self._storage.lookup(fingerprint, self._force.get(request.label, "")) if known else None
        )
        artifact = record.artifact if record else _NOT_MADE
        status: Status = "unknown" if not known else "hit" if record else "miss"
        self.stages.append(
            PlannedStage(
                request.label,
                status,
                fingerprint,
                inputs,
                artifact.digest,
                self._adoption(request, record) if known else "",
            )
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

    def _adoption(self, request: StageRequest, record: CommitRecord | None) -> str:
        """What there is to say about half-trained work, in words."""
        if record is not None:
            return f"adopted {record.adopted}" if record.adopted else ""
        if request.label in self._adopt:
            find_adoptable(self._storage, request)
        found = half_trained(self._storage, request)
        return found[0].offer(request.label) if found else ""
