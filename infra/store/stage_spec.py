"""What travels between a task and its job: plain JSON, validated on both sides.

A task writes a `StageSpec` to `work/<fingerprint>/attempt-<n>/spec.json` and submits
`python -m <job_module> SPEC`. The job writes its files under `work/<fingerprint>/`, publishes
them as one artifact and commits the fingerprint. Between stages only `Artifact` handles travel.

Layout of a stage's work directory::

    work/<fingerprint>/
        attempt-0/spec.json, heartbeat.json, error.json
        checkpoints/step-00000050/...    step checkpoints, manifest last
        journal.jsonl                    metrics and progress, append-only, over all attempts
        output/                          the files to publish
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Artifact(BaseModel):
    """A handle to an immutable directory in the store.

    Equal content has an equal `digest`, whoever made it; who made it stands in the commit
    record of `fingerprint`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    """`dataset`, `policy`, `model`, `evaluation`, `promotion` or `external`."""
    uri: str
    """Where the files are: an absolute directory, or a store URI."""
    digest: str
    """sha256 of the manifest's canonical form, 64 hex digits."""
    fingerprint: str | None = None
    """The stage that published it; None for input from outside the pipeline."""

    def local_path(self) -> Path:
        """Directory of a locally stored artifact."""
        return Path(self.uri)


class StageSpec(BaseModel):
    """Everything a job knows about the stage it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    stage: str
    job_module: str
    fingerprint: str
    attempt: int
    config: dict[str, Any]
    """The resolved stage configuration, validated by the job with `engines.config.stages`."""
    inputs: dict[str, Artifact]
    seed: int
    store_uri: str
    work_dir: Path
    """`work/<fingerprint>`, shared by all attempts."""
    sources: dict[str, str] = {}
    """sha256 by module of the code that the fingerprint was made from; compared by the job."""
    libraries: dict[str, str | None] = {}
    """Versions by distribution, the same."""
    runtime: dict[str, Any] = {}
    """`engines.config.stages.Runtime`: what cannot change the output."""

    @property
    def attempt_dir(self) -> Path:
        """This attempt's own directory."""
        return self.work_dir / f"attempt-{self.attempt}"

    @property
    def output_dir(self) -> Path:
        """Where the job puts the files it will publish."""
        return self.work_dir / "output"

    @property
    def checkpoints_dir(self) -> Path:
        """Step checkpoints, shared by all attempts."""
        return self.work_dir / "checkpoints"

    @property
    def journal_path(self) -> Path:
        """Metrics and progress, shared by all attempts."""
        return self.work_dir / "journal.jsonl"


class CommitRecord(BaseModel):
    """The store's entry `stages/<fingerprint>`: this stage is done, and this is its output."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    fingerprint: str
    stage: str
    artifact: Artifact
    attempt: int
    metrics: dict[str, float] = {}
    """Headline metrics of the stage."""
    seconds: dict[str, float] = {}
    """Wall seconds of the job's phases (`load`, `train`, `gen`, `reward`, `total` ...)."""
    committed_at: str
    """UTC, ISO 8601."""
