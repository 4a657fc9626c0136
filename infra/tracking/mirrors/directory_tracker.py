"""What trackers that keep their runs in directories of this machine share.

    <root>/origin                          the directory's own name for itself
    <root>/models.json                     what was registered
    <root>/<run>-<key>/run.json            how a run stands, and how many bytes of its points count
    <root>/<run>-<key>/<points>            its points, appended
    <root>/<run>-<key>/<stage>-<key>/      a stage below its run

Promises: points are there once over kills, of the process or the machine: bytes behind those that
`run.json` counts are cut before anything is appended, and `run.json` is replaced when they are
durable; a file of points that lost bytes is begun anew. Processes take turns.
Does not promise: two machines that share the directory.
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
    """`run.json`."""

    key: str
    name: str
    parent: str | None = None
    params: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    tags: dict[str, str] = {}
    state: RunState = "RUNNING"
    position: str = ""
    num_bytes: int = 0
    """Of the points; what is behind them was not told to its end."""


class Bearer(FrozenModel):
    """A model that an alias points to, and the one that it took the alias from."""

    artifact: Artifact
    beat: Artifact | None = None


class Models(FrozenModel):
    """`models.json`: digests of the versions by model, and by `name@alias` who bears it."""

    versions: dict[str, list[str]] = {}
    aliases: dict[str, Bearer] = {}


class DirectoryTracker(ABC):
    """A `Tracker` but for the form of its points.

    Args:
        root: made when something is first told.
    """

    points_name: str
    """File of a run's points."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._known: dict[str, tuple[int, set[tuple[str, int]]]] = {}

    @classmethod
    def root_of(cls, settings: TrackerSettings, name: str) -> Path:
        """Where a tracker of this machine keeps its runs: `uri`, else a directory of the home."""
        return Path(settings.uri) if settings.uri else settings.home / name

    @abstractmethod
    def encode(self, run: StoredRun, points: Sequence[MetricPoint]) -> bytes:
        """Points as they are appended; `run.num_bytes` is 0 for the first ones."""

    @abstractmethod
    def names_in(self, path: Path, num_bytes: int) -> set[tuple[str, int]]:
        """Name and step of every point in the first bytes of a file, all of them whole."""

    @property
    def address(self) -> str:
        """The directory."""
        return f"{type(self).__name__} {self.root}"

    def is_absent(self) -> bool:
        """Whether nothing was ever told."""
        return not (self.root / "origin").exists()

    def origin(self) -> str:
        """A name that the directory got when it was made."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self.is_absent():
            create_exclusively(self.root / "origin", uuid.uuid4().hex.encode())
        return (self.root / "origin").read_text(encoding="utf-8")

    def open_run(self, run: TrackedRun) -> str:
        """The path below the root, which follows from name, key and parent."""
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
        """A run as it stands.

        Args:
            run_id: from `open_run`.

        Returns:
            Without points if bytes of them were lost.

        Raises:
            TrackerRefusedError: there is no such run.
        """
        stored = load_record(self.root / run_id / RECORD, StoredRun)
        if stored is None:
            raise TrackerRefusedError(f"{self.root} has no run {run_id!r}")
        path = self.points_path(run_id)
        if stored.num_bytes > (path.stat().st_size if path.exists() else 0):
            return stored.model_copy(update={"num_bytes": 0, "position": ""})
        return stored

    def points_path(self, run_id: str) -> Path:
        """File of a run's points."""
        return self.root / run_id / self.points_name

    def position(self, run_id: str) -> str:
        """Of the points that count."""
        return self.run(run_id).position

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Append what the run does not have, then count it."""
        with self._alone():
            self._append(run_id, points, position=position)

    def set_state(
        self, run_id: str, state: RunState, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        """Headline numbers stand at step 0, where no step has one of that name."""
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
        """The tags of `set_state` say it already."""
        del run_id, output

    def log_samples(
        self,
        run_id: str,
        steps: Mapping[int, Sequence[KeptSample]],
        times_ms: Mapping[int, int],
    ) -> None:
        """The page that `rlhf show` writes has them; points alone are kept here."""
        del run_id, steps, times_ms

    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        """Copied below the run."""
        shutil.copytree(directory, self.root / run_id / "files" / path, dirs_exist_ok=True)

    def register(self, candidate: ModelCandidate) -> str:
        """Noted by digest, and no more: the model's files stay where they are."""
        with self._alone():
            models = self._models()
            digest = candidate.artifact.digest
            versions = models.versions.get(candidate.name, [])
            versions = versions if digest in versions else [*versions, digest]
            bearer = Bearer(artifact=candidate.artifact, beat=candidate.beat)
            told = Models(
                versions={**models.versions, candidate.name: versions},
                aliases={**models.aliases, f"{candidate.name}@{candidate.alias}": bearer},
            )
            save_record(self.root / "models.json", told)
            return str(versions.index(digest) + 1)

    def incumbent(self, name: str, alias: str) -> Incumbent | None:
        """As it was noted."""
        models = self._models()
        bearer = models.aliases.get(f"{name}@{alias}")
        if bearer is None:
            return None
        number = models.versions[name].index(bearer.artifact.digest) + 1
        return Incumbent(str(number), bearer.artifact, bearer.beat)

    def aliased(self) -> dict[str, str]:
        """As they were noted."""
        return {each.artifact.digest: alias for alias, each in self._models().aliases.items()}

    def _models(self) -> Models:
        return load_record(self.root / "models.json", Models) or Models()

    def _alone(self) -> AbstractContextManager[None]:
        return file_lock(self.root / ".lock", LOCK_DEADLINE_S)

    def _have(self, run_id: str, stored: StoredRun) -> set[tuple[str, int]]:
        """Name and step of the points that count; read again if others appended some."""
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
