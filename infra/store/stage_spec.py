"""Data that a task and its job exchange: plain JSON, validated on both sides.

A task writes a `StageSpec` to the stage's `WorkChannel` and submits `python -m <job_module> STORE
FINGERPRINT ATTEMPT`. The job publishes its files as one artifact and commits the fingerprint.
Between stages only `Artifact` handles travel.
"""

import re
from collections.abc import Sequence
from typing import Any

from infra.frozen_model import FrozenModel

NUM_SHOWN = 12
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")


def check_fingerprint(name: str) -> str:
    """Return a fingerprint or follower name; `ValueError` if it is no safe path component."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"fingerprint: got {name!r}; need {_NAME.pattern}")
    return name


def some(names: Sequence[str]) -> str:
    """Return the first `NUM_SHOWN` names as one text, with the number of the others."""
    more = len(names) - NUM_SHOWN
    return ", ".join(names[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


class Artifact(FrozenModel):
    """A handle to content in or outside the store; equal content has an equal `digest`."""

    kind: str
    """Type of the content, such as `dataset`, `policy`, `model`, `promotion` or `external`."""
    uri: str
    """Location of the files: an absolute path, or a store URI."""
    digest: str
    """sha256 of the manifest's canonical form, 64 hex digits."""
    fingerprint: str | None = None
    """Stage that published it; None for input from outside the pipeline."""


class Adoption(FrozenModel):
    """Unfinished work of another fingerprint that a stage continues after its step `step`.

    That work may itself have adopted earlier steps.
    """

    fingerprint: str
    generation: int
    """Number of its first attempt in that fingerprint's log."""
    step: int
    """Last adopted step, counted within the stage."""
    digest: str
    """Digest of that step's checkpoint."""
    differs: tuple[str, ...]
    """Differences of that work: source modules, libraries, fields with both values."""

    def __str__(self) -> str:
        differs = some(self.differs)
        return f"step {self.step} of {self.fingerprint[:12]}, which differs in {differs}"


class StageSpec(FrozenModel):
    """Everything a job knows about the stage it runs."""

    schema_version: int = 1
    stage: str
    job_module: str
    fingerprint: str
    attempt: int
    """Number of its *held* entry in the stage's log."""
    holder: str = ""
    """Id of the holder of the *held* entry, for which the job commits."""
    config: dict[str, Any]
    """Resolved stage configuration; the job validates it with `engines.config.stages`."""
    inputs: dict[str, Artifact]
    seed: int
    store_uri: str
    adopted: Adoption | None = None
    sources: dict[str, str] = {}
    """sha256 by module of the code in the fingerprint; the job compares it with its own."""
    libraries: dict[str, str | None] = {}
    """Versions by distribution; the job compares them with its own."""
    rollout_libraries: dict[str, str | None] = {}
    """Versions in the replicas' job environment; empty if they have none of their own."""
    runtime: dict[str, Any] = {}
    """`engines.config.stages.base.Runtime`: settings that cannot change the output."""
    then: "NextStage | None" = None
    """Stage that the job's process runs after this one, as a separate process would."""

    @property
    def job_argv(self) -> list[str]:
        """Options and arguments of the interpreter that runs the job."""
        return ["-P", "-m", self.job_module, self.store_uri, self.fingerprint, str(self.attempt)]


class NextStage(FrozenModel):
    """A stage whose only missing input is the output of the previous one, named by its kind."""

    spec: StageSpec
    """Specification of its first attempt; inputs and fingerprint lack the previous output."""
    identity: dict[str, Any]
    """Everything that its fingerprint hashes, except the digest of the previous output."""
    follower: str
    """Name of the follower that waits for it."""
    run_key: str


class CommitRecord(FrozenModel):
    """The content of a *committed* log entry: the stage is done, and `artifact` is its output."""

    schema_version: int = 1
    fingerprint: str
    stage: str
    artifact: Artifact
    attempt: int
    adopted: Adoption | None = None
    """Work that the result continues; None: every step was computed under this fingerprint."""
    metrics: dict[str, float] = {}
    seconds: dict[str, float] = {}
    """Wall-clock seconds of the job's phases (`load`, `train`, `gen`, `reward`, `total` ...)."""
    committed_at: str  # UTC, ISO 8601
