"""A store in a directory, as the tests of its garbage see it: its things can be made older."""

import os
import time
import uuid
from pathlib import Path

from infra.garbage import DAY_S, Limits, Survey, collect, survey
from infra.store.canonical import sha256_json
from infra.store.inventory import LocalInventory
from infra.store.stage_log import Attempt, Holder
from infra.store.stage_spec import Artifact, CommitRecord, NextStage, StageSpec
from infra.store.storage import LocalStorage
from infra.tracking.promotion import DECISION_NAME, PROMOTION, Decision


class Store:
    """A store whose things can be made older than they are."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = LocalStorage(root / "store")
        self.inventory = LocalInventory(root / "store")

    def survey(self, aliased: dict[str, str] | None = None, **limits: float) -> Survey:
        return survey(
            LocalStorage(self.root / "store"), self.inventory, aliased or {}, Limits(**limits)
        )

    def collect(self, **limits: float) -> list[str]:
        """Names of the stages that went."""
        found = self.survey(**limits)
        done = collect(self.storage, self.inventory, found)
        assert done.problems == done.spared == ()
        assert done.freed_bytes == found.freed_bytes
        return [stage.fingerprint for stage in found.goes]

    def hold(self, name: str) -> Attempt:
        holder = Holder(id=uuid.uuid4().hex, process="test")
        number = len(self.storage.attempts.entries(fp(name)))
        return self.storage.attempts.hold(fp(name), holder, number)

    def commit(self, name: str, days: float = 0, text: str = "", num_bytes: int = 100) -> Artifact:
        """A stage that is done, and was last touched days ago."""
        source = self.root / "out"
        source.mkdir()
        (source / "data.txt").write_text((text or name).ljust(num_bytes))
        artifact = self.storage.publish(source, "model")
        self._commit(name, artifact)
        self.age(name, artifact, days)
        return artifact

    def promote(self, name: str, model: Artifact, day: int, text: str = "") -> None:
        """A gate that a model passed on a day; `text`: its decision, of another version."""
        source = self.root / "out"
        source.mkdir()
        decision = Decision(
            promoted=True, metric="accuracy", value=float(day), min_value=0,
            model_digest=model.digest, model_name="m", alias="champion",
        )  # fmt: skip
        decision.write(source)
        if text:
            (source / DECISION_NAME).write_text(text)
        artifact = self.storage.publish(source, PROMOTION)
        self._commit(name, artifact, f"2026-01-{day:02}T00:00:00Z")
        self.age(name, artifact, 40)

    def half_trained(
        self, name: str, days: float, then: StageSpec | None = None, **inputs: Artifact
    ) -> Attempt:
        attempt = self.hold(name)
        spec = self.specification(name, attempt.number, inputs)
        if then is not None:
            after = NextStage(spec=then, identity={}, follower="f", run_key=fp("run"))
            spec = spec.model_copy(update={"then": after})
        self.storage.channel(fp(name)).write_specification(spec)
        step = self.storage.channel(fp(name)).steps_dir(0) / "step-00000001"
        step.mkdir(parents=True)
        (step / "weights").write_bytes(b"w" * 1000)
        self.age(name, None, days)
        return attempt

    def specification(self, name: str, attempt: int, inputs: dict[str, Artifact]) -> StageSpec:
        return StageSpec(
            stage="sft", job_module="m", fingerprint=fp(name), attempt=attempt, config={},
            inputs=inputs, seed=0, store_uri=self.storage.uri,
        )  # fmt: skip

    def age(self, name: str, artifact: Artifact | None, days: float) -> None:
        places = [self.root / "store" / part / fp(name) for part in ("stages", "work")]
        places += [Path(artifact.uri)] if artifact else []
        for place in places:
            for path in (place, *place.rglob("*")):
                if path.exists():
                    set_age(path, days)

    def use(self, run: str, *names: str, days: float = 0, reads: Artifact | None = None) -> str:
        """A run that asked for stages, and said that it reads an artifact, days ago."""
        key = fp(run)
        self.storage.runs.begin(key, run)
        for name in names:
            self.storage.runs.use(key, fp(name))
            set_age(self.root / "store/runs" / key / "stages" / fp(name), days)
        if reads is not None:
            self.storage.runs.read(key, reads.digest)
            set_age(self.root / "store/runs" / key / "artifacts" / reads.digest, days)
        return key

    def has(self, name: str) -> bool:
        """Whether a stage is done; all of its bytes are there then."""
        fresh = LocalStorage(self.root / "store")
        record = fresh.lookup(fp(name))
        return record is not None and fresh.local_copy(record.artifact).is_dir()

    def _commit(self, name: str, artifact: Artifact, at: str = "2026-01-01T00:00:00Z") -> None:
        attempt = self.hold(name)
        record = CommitRecord(
            fingerprint=fp(name),
            stage="sft",
            artifact=artifact,
            attempt=attempt.number,
            committed_at=at,
        )
        self.storage.commit(attempt, record)


def fp(name: str) -> str:
    return sha256_json(name)


def set_age(path: Path, days: float) -> None:
    at = time.time() - days * DAY_S
    os.utime(path, (at, at))
