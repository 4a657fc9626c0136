"""The interface of a tracking service.

A tracker only stores what it is sent; `infra.tracking.shipper` decides when to send what. To add a
service: write one class and one row of kind `tracker`. Every tracker promises, as
`tests/contracts/test_tracker.py` checks: creating it and reading its `address` opens and imports
nothing; any process may repeat any call, and the repetition changes nothing; repeating a call that
failed half way completes it.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from infra.store.artifacts import Manifest
from infra.store.stage_spec import Artifact
from infra.tracking.samples import KeptSample

RunState = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


class TrackerRefusedError(Exception):
    """The service works but refused this call; other exceptions may mean that it is unreachable."""


@dataclass(frozen=True)
class TrackerSettings:
    """Settings from which a tracker is created; runs are grouped under `experiment`.

    `home` is the absolute directory for files of a service without a server. A `uri` of None means
    the tracker's default.
    """

    home: Path
    uri: str | None = None
    experiment: str = "rlhf"


@dataclass(frozen=True)
class TrackedRun:
    """A run to create; there is one run per `key`.

    `params` may be nested; `inputs` are the artifacts that it reads, by name.
    """

    key: str
    name: str
    parent_id: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Artifact] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackedOutput:
    """The output of the stage `name`; the manifest is None if the store has lost it."""

    name: str
    artifact: Artifact
    manifest: Manifest | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class MetricPoint:
    """One value of a metric, possibly NaN or infinite, with the time since the epoch."""

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class ModelCandidate:
    """A model to register under `name` and to give the alias (`champion`).

    `directory` is a local Hugging Face directory; `run_id` is the run that decided about it; `beat`
    is the model that it replaces under the alias after a comparison, None if there is none.
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
    """The registered version that an alias points to; `beat` is the model that it replaced there.

    The artifact's digest is empty if another program registered the version.
    """

    version: str
    artifact: Artifact
    beat: Artifact | None = None


class Tracker(Protocol):
    """A tracking server, an embedded database, or a file."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Resolved name of the service, equal for two trackers that show the same runs."""

    @abstractmethod
    def is_absent(self) -> bool:
        """True if it is known, without contacting the service, that nothing was ever sent to it."""

    @abstractmethod
    def origin(self) -> str:
        """Return the identity of the storage behind the address; a new one lacks earlier runs."""

    @abstractmethod
    def open_run(self, run: TrackedRun) -> str:
        """Return the id of the run with this key; creates it as RUNNING if there is none."""

    @abstractmethod
    def position(self, run_id: str) -> str:
        """Return the position of the last `log_metrics`; empty if there was none."""

    @abstractmethod
    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Add points that the run does not have, then store the position of its source."""

    @abstractmethod
    def set_state(
        self,
        run_id: str,
        state: RunState,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> None:
        """Set state and tags of a run; `RUNNING` reopens an ended run. Existing metrics stay."""

    @abstractmethod
    def log_output(self, run_id: str, output: TrackedOutput) -> None:
        """Show the output of a run; `set_state` sends its digest, kind and location as tags too."""

    @abstractmethod
    def log_samples(
        self,
        run_id: str,
        steps: Mapping[int, Sequence[KeptSample]],
        times_ms: Mapping[int, int],
    ) -> None:
        """Show completions of the policy; they replace earlier ones of the same step.

        The samples are bounded in number and bytes. Times are in milliseconds since the epoch.
        """

    @abstractmethod
    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        """Store the files of a local directory with a run, under `path`."""

    @abstractmethod
    def register(self, candidate: ModelCandidate) -> str:
        """Register a model as a version, once per digest; set the alias; return the version."""

    @abstractmethod
    def incumbent(self, name: str, alias: str) -> Incumbent | None:
        """Return the version that an alias points to; None without a version."""

    @abstractmethod
    def aliased(self) -> Mapping[str, str]:
        """Return `name@alias` of the models that an alias points to, by digest."""
