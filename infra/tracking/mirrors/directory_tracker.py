"""Base of trackers that keep their runs in local directories.

    <root>/origin                          random id of the directory
    <root>/models.json                     registered models
    <root>/<run>-<key>/run.json            state of the run, and number of valid bytes of its points
    <root>/<run>-<key>/<points>            its points, appended
    <root>/<run>-<key>/<stage>-<key>/      a stage of the run

Promises: points are stored once, even if process or machine are killed: bytes beyond the count in
`run.json` are cut before an append, and `run.json` is replaced once the points are durable; a
truncated file of points is rewritten from the start. Processes take turns by a lock.
Does not promise: that two machines can share the directory.
"""

import os
import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from infra.frozen_model import FrozenModel
from infra.host.records import file_lock, load_record, save_record
from infra.store.atomic import create_exclusively, fsync_directory
from infra.store.stage_spec import Artifact
from infra.tracking.samples import KeptSample
from infra.tracking.tracker import (
    Incumbent,
    MetricPoint,
    ModelCandidate,
    RunState,
    TrackedOutput,
    TrackedRun,
    TrackerRefusedError,
    TrackerSettings,
)

LOCK_DEADLINE_S = 60.0
KEY_DIGITS = 8
RECORD = "run.json"


class StoredRun(FrozenModel):
    """Content of `run.json`."""

    key: str
    name: str
    parent: str | None = None
    params: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    tags: dict[str, str] = {}
    state: RunState = "RUNNING"
    position: str = ""
    num_bytes: int = 0
    """Valid bytes of the points; later bytes belong to an interrupted call."""


class StoredIncumbent(FrozenModel):
    """A model that an alias points to, and the model that it replaced there."""

    artifact: Artifact
    beat: Artifact | None = None


class Models(FrozenModel):
    """Content of `models.json`: digests of the versions by model, incumbents by `name@alias`."""

    versions: dict[str, list[str]] = {}
    aliases: dict[str, StoredIncumbent] = {}


class DirectoryTracker(ABC):
    """A `Tracker` in `root`, created at the first write; subclasses encode and parse the points."""

    points_name: str
    """File name of a run's points."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._known: dict[str, tuple[int, set[tuple[str, int]]]] = {}

    @classmethod
    def root_of(cls, settings: TrackerSettings, name: str) -> Path:
        """Return the root of a local tracker: `uri`, else a directory of the home."""
        return Path(settings.uri) if settings.uri else settings.home / name

    @abstractmethod
    def encode(self, run: StoredRun, points: Sequence[MetricPoint]) -> bytes:
        """Encode points to append; `run.num_bytes` is 0 for the first points of a run."""

    @abstractmethod
    def names_in(self, path: Path, num_bytes: int) -> set[tuple[str, int]]:
        """Return (name, step) of every point in the first `num_bytes` of a file."""

    @property
    def address(self) -> str:
        """Class and directory of the tracker."""
        return f"{type(self).__name__} {self.root}"

    def is_absent(self) -> bool:
        """True if nothing was ever written."""
        return not (self.root / "origin").exists()

    def origin(self) -> str:
        """Return the random id that the directory got when it was created."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self.is_absent():
            create_exclusively(self.root / "origin", uuid.uuid4().hex.encode())
        return (self.root / "origin").read_text(encoding="utf-8")

    def open_run(self, run: TrackedRun) -> str:
        """Return the run's path below the root, derived from name, key and parent."""
        self.origin()
        own = f"{re.sub(r'[^A-Za-z0-9._-]', '_', run.name)}-{run.key[:KEY_DIGITS]}"
        run_id = f"{run.parent_id}/{own}" if run.parent_id else own
        with self._alone():
            if load_record(self.root / run_id / RECORD, StoredRun) is None:
                stored = StoredRun(
                    key=run.key,
                    name=run.name,
                    parent=run.parent_id,
                    params=dict(run.params),
                    inputs={name: each.digest for name, each in run.inputs.items()},
                    tags=dict(run.tags),
                )
                save_record(self.root / run_id / RECORD, stored)
        return run_id

    def run(self, run_id: str) -> StoredRun:
        """Return a run's record, reset if points are lost; TrackerRefusedError if it is absent."""
        stored = load_record(self.root / run_id / RECORD, StoredRun)
        if stored is None:
            raise TrackerRefusedError(f"{self.root} has no run {run_id!r}")
        path = self.points_path(run_id)
        if stored.num_bytes > (path.stat().st_size if path.exists() else 0):
            return stored.model_copy(update={"num_bytes": 0, "position": ""})
        return stored

    def points_path(self, run_id: str) -> Path:
        """Return the file of a run's points."""
        return self.root / run_id / self.points_name

    def position(self, run_id: str) -> str:
        """Return the position stored with the valid points."""
        return self.run(run_id).position

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Append the points that the run does not have."""
        with self._alone():
            self._append(run_id, points, position=position)

    def set_state(
        self, run_id: str, state: RunState, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        """Store state and tags; headline metrics without a point are added at step 0."""
        with self._alone():
            stored = self.run(run_id)
            at_ms = time.time_ns() // 1_000_000
            have = {name for name, _ in self._have(run_id, stored)}
            points = [
                MetricPoint(name, float(value), 0, at_ms)
                for name, value in metrics.items()
                if name not in have
            ]
            self._append(run_id, points, state=state, tags={**stored.tags, **tags})

    def log_output(self, run_id: str, output: TrackedOutput) -> None:
        """Do nothing: the tags of `set_state` contain the output."""
        del run_id, output

    def log_samples(
        self,
        run_id: str,
        steps: Mapping[int, Sequence[KeptSample]],
        times_ms: Mapping[int, int],
    ) -> None:
        """Do nothing: only points are kept; the page of `rlhf show` has the samples."""
        del run_id, steps, times_ms

    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        """Copy the files below the run."""
        shutil.copytree(directory, self.root / run_id / "files" / path, dirs_exist_ok=True)

    def register(self, candidate: ModelCandidate) -> str:
        """Record the digest; the model's files are not copied."""
        with self._alone():
            models = self._models()
            digest = candidate.artifact.digest
            versions = models.versions.get(candidate.name, [])
            versions = versions if digest in versions else [*versions, digest]
            incumbent = StoredIncumbent(artifact=candidate.artifact, beat=candidate.beat)
            told = Models(
                versions={**models.versions, candidate.name: versions},
                aliases={**models.aliases, f"{candidate.name}@{candidate.alias}": incumbent},
            )
            save_record(self.root / "models.json", told)
            return str(versions.index(digest) + 1)

    def incumbent(self, name: str, alias: str) -> Incumbent | None:
        """Return the version that `models.json` records for an alias."""
        models = self._models()
        stored = models.aliases.get(f"{name}@{alias}")
        if stored is None:
            return None
        number = models.versions[name].index(stored.artifact.digest) + 1
        return Incumbent(str(number), stored.artifact, stored.beat)

    def aliased(self) -> dict[str, str]:
        """Return the recorded aliases by digest."""
        return {each.artifact.digest: alias for alias, each in self._models().aliases.items()}

    def _models(self) -> Models:
        return load_record(self.root / "models.json", Models) or Models()

    def _alone(self) -> AbstractContextManager[None]:
        return file_lock(self.root / ".lock", LOCK_DEADLINE_S)

    def _have(self, run_id: str, stored: StoredRun) -> set[tuple[str, int]]:
        num_bytes, names = self._known.get(run_id, (0, set[tuple[str, int]]()))
        if num_bytes != stored.num_bytes:
            names = self.names_in(self.points_path(run_id), stored.num_bytes)
            self._known[run_id] = (stored.num_bytes, names)
        return names if stored.num_bytes else set()

    def _append(self, run_id: str, points: Sequence[MetricPoint], **changes: Any) -> None:
        stored = self.run(run_id)
        have = self._have(run_id, stored)
        fresh = {(p.name, p.step): p for p in points if (p.name, p.step) not in have}
        data = self.encode(stored, list(fresh.values())) if fresh else b""
        path = self.points_path(run_id)
        num_bytes = stored.num_bytes + len(data)
        if data:
            is_new = not path.exists()
            with path.open("ab") as file:
                file.truncate(stored.num_bytes)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                fsync_directory(path.parent)
        told = stored.model_copy(update={**changes, "num_bytes": num_bytes})
        save_record(self.root / run_id / RECORD, told)
        self._known[run_id] = (num_bytes, have | set(fresh))
