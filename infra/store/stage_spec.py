"""What travels between a task and its job: plain JSON, validated on both sides.

A task writes a `StageSpec` to the stage's `WorkChannel` and submits
`python -m <job_module> STORE FINGERPRINT ATTEMPT`. The job publishes its files as one artifact and
commits the fingerprint. Between stages only `Artifact` handles travel.
"""

import re
from collections.abc import Sequence
from typing import Any

from infra.frozen_model import FrozenModel

NUM_SHOWN = 12
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")


def check_fingerprint(name: str) -> str:
    """A fingerprint (or a follower's name) that is a plain name: it becomes part of a path."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"fingerprint: got {name!r}; need {_NAME.pattern}")
    return name


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many there are besides."""
    more = len(names) - NUM_SHOWN
    return ", ".join(names[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


class Artifact(FrozenModel):
    """A handle to an immutable directory in the store.

    Equal content has an equal `digest`, whoever made it; who made it stands in the commit
    record of `fingerprint`.
    """

    kind: str
    """`dataset`, `policy`, `model`, `evaluation`, `promotion` or `external`."""
    uri: str
    """Where the files are: an absolute directory, or a store URI."""
    digest: str
    """sha256 of the manifest's canonical form, 64 hex digits."""
    fingerprint: str | None = None
    """The stage that published it; None for input from outside the pipeline."""


class Adoption(FrozenModel):
    """Whose steps a stage continues that was half-trained under another fingerprint.

    The steps up to `step` were computed by that other work, which may itself have adopted some.
    """

    fingerprint: str
    """Of the work that was continued."""
    generation: int
    """Number of its first attempt in that fingerprint's log."""
    step: int
    """Last step of it that is in the result, counted within the stage."""
    digest: str
    """Of that step's checkpoint."""
    differs: tuple[str, ...]
    """How that work differed: modules of source, libraries, fields with both values."""

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
    """Id of that entry's holder, on whose behalf the job commits."""
    config: dict[str, Any]
    """The resolved stage configuration, validated by the job with `engines.config.stages`."""
    inputs: dict[str, Artifact]
    seed: int
    store_uri: str
    adopted: Adoption | None = None
    """Of the attempt's generation."""
    sources: dict[str, str] = {}
    """sha256 by module of the code that the fingerprint was made from; compared by the job."""
    libraries: dict[str, str | None] = {}
    """Versions by distribution, the same."""
    rollout_libraries: dict[str, str | None] = {}
    """The same of the replicas' job environment; empty where they have none of their own."""
    runtime: dict[str, Any] = {}
    """`engines.config.stages.base.Runtime`: what cannot change the output."""
    then: "NextStage | None" = None
    """What the job's process runs after this, as a process of its own would."""

    @property
    def job_argv(self) -> list[str]:
        """How the interpreter of the job runs it: its options and arguments."""
        return ["-P", "-m", self.job_module, self.store_uri, self.fingerprint, str(self.attempt)]


class NextStage(FrozenModel):
    """A stage that waits for nothing but the output of another, and names it by its kind."""

    spec: StageSpec
    """Of its first attempt; the output is not among the inputs, nor in the fingerprint."""
    identity: dict[str, Any]
    """What its fingerprint is made of, but for the output's digest."""
    follower: str
    """Who waits for it."""
    run_key: str
    """Of the run that uses it, as the store knows it."""


class CommitRecord(FrozenModel):
    """What a *committed* entry of a stage's log says: it is done, and this is its output."""

    schema_version: int = 1
    fingerprint: str
    stage: str
    artifact: Artifact
    attempt: int
    adopted: Adoption | None = None
    """Whose work the result continues; None: every step was computed under this fingerprint."""
    metrics: dict[str, float] = {}
    """Headline metrics of the stage."""
    seconds: dict[str, float] = {}
    """Wall seconds of the job's phases (`load`, `train`, `gen`, `reward`, `total` ...)."""
    committed_at: str
    """UTC, ISO 8601."""
