"""What shows runs to people: the one face of every tracking server.

A tracker stores what it is told and nothing else: when to tell it, what it knows already and what
to do while it is away is `infra.tracking.shipper`'s work. MLflow stands behind this in
`infra.tracking.mlflow_tracker`; another service takes one class and one row of kind `tracker`.
A tracker's promises, which `tests/contracts/test_tracker.py` holds it to: making one and asking
for its `address` opens and imports nothing; every call may be repeated, by any process, and
changes nothing the second time; a call that failed half way is made whole by its repeat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from infra.store.artifacts import Manifest
from infra.store.stage_spec import Artifact
from infra.tracking.samples import KeptSample

RunState = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


class TrackerRefusedError(Exception):
    """The service works and refused this one call; any other exception means that it is away."""


@dataclass(frozen=True)
class TrackerSettings:
    """What a tracker is made from.

    Attributes:
        home: directory that a service without a server may keep its files in; absolute.
        uri: address of the service; None leaves it to the tracker.
        experiment: name under which the runs are gathered.
    """

    home: Path
    uri: str | None = None
    experiment: str = "rlhf"


@dataclass(frozen=True)
class TrackedRun:
    """A run as it is created.

    Attributes:
        key: identifies it: one run per key, whoever asks.
        name: for people.
        parent_id: id of the run that it belongs to.
        params: settings, nested.
        tags: short texts.
        inputs: what it reads, by name.
    """

    key: str
    name: str
    parent_id: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Artifact] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackedOutput:
    """What a stage made.

    Attributes:
        name: of the stage.
        artifact: what it made.
        manifest: of its files; None where the store has it no longer.
        metrics: headline numbers of the stage.
    """

    name: str
    artifact: Artifact
    manifest: Manifest | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class MetricPoint:
    """One value of a metric.

    Attributes:
        name: of the metric.
        value: may be NaN or infinite.
        step: of the stage.
        time_ms: when it was measured, milliseconds since the epoch.
    """

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class ModelCandidate:
    """A model that is to be registered.

    Attributes:
        name: of the registered model.
        alias: moves to this model (`champion`).
        artifact: the model.
        directory: its files, a Hugging Face directory of this machine.
        run_id: the run that decided about it.
        metrics: headline numbers.
        beat: the model that it was compared with and that it takes the alias from; None: none.
    """

    name: str
    alias: str
    artifact: Artifact
    directory: Path
    run_id: str
    metrics: Mapping[str, float]
    beat: Artifact | None = None


@dataclass(frozen=True)
class Incumbent:
    """The version that bears an alias.

    Attributes:
        version: its number.
        artifact: the model; its digest is empty where somebody else registered the version.
        beat: as the last `ModelCandidate` of this digest had it.
    """

    version: str
    artifact: Artifact
    beat: Artifact | None = None


class Tracker(Protocol):
    """A tracking server, an embedded database, a file."""

    @property
    def address(self) -> str:
        """Which service this is, resolved: equal for two trackers that show the same runs."""
        ...

    def is_absent(self) -> bool:
        """Whether it can be seen, without asking, that nothing was ever told to this address."""
        ...

    def origin(self) -> str:
        """Names what is behind the address now; another one has lost what it was told."""
        ...

    def open_run(self, run: TrackedRun) -> str:
        """The id of the run with this key; created as RUNNING if there is none."""
        ...

    def position(self, run_id: str) -> str:
        """The position of the last `log_metrics`; empty if there was none."""
        ...

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Add points to a run, then keep how far its source was read.

        Args:
            run_id: from `open_run`.
            points: those that the run has already are not doubled.
            position: kept once all points are there.
        """
        ...

    def set_state(
        self,
        run_id: str,
        state: RunState,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> None:
        """Say how a run stands.

        Args:
            run_id: from `open_run`.
            state: `RUNNING` starts it again.
            tags: replace those of the same name.
            metrics: headline numbers; those that the run has already are left.
        """
        ...

    def log_output(self, run_id: str, output: TrackedOutput) -> None:
        """Show what a run made; digest, kind and place are among the tags of `set_state` too."""
        ...

    def log_samples(
        self,
        run_id: str,
        steps: Mapping[int, Sequence[KeptSample]],
        times_ms: Mapping[int, int],
    ) -> None:
        """Show what a policy wrote.

        Args:
            run_id: from `open_run`.
            steps: samples by step, bounded in number and bytes; those of a step that the run has
                already are replaced.
            times_ms: when the steps were, milliseconds since the epoch.
        """
        ...

    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        """Keep the files of a local directory with a run, under `path`."""
        ...

    def register(self, candidate: ModelCandidate) -> str:
        """Make a model a version, once per digest, and give it the alias; its number."""
        ...

    def incumbent(self, name: str, alias: str) -> Incumbent | None:
        """Who bears an alias of a registered model; None: nobody, or there is no such model."""
        ...

    def aliased(self) -> Mapping[str, str]:
        """Registered models that an alias points to: `name@alias` by digest of the artifact."""
        ...
