"""A tracker that keeps its runs in one SQLite file."""

import json
import shutil
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

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

SCHEMA = """
CREATE TABLE IF NOT EXISTS origin (one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT);
CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, parent TEXT, state TEXT, position TEXT,
    described TEXT);
CREATE TABLE IF NOT EXISTS points (run TEXT, name TEXT, step INTEGER, value TEXT, time_ms INTEGER,
    PRIMARY KEY (run, name, step));
CREATE TABLE IF NOT EXISTS tags (run TEXT, name TEXT, value TEXT, PRIMARY KEY (run, name));
CREATE TABLE IF NOT EXISTS versions (number INTEGER, model TEXT, digest TEXT,
    artifact TEXT, beat TEXT, PRIMARY KEY (model, digest));
CREATE TABLE IF NOT EXISTS aliases (model TEXT, alias TEXT, digest TEXT,
    PRIMARY KEY (model, alias));
"""


class SqliteTracker:
    """An `infra.tracking.tracker.Tracker` over the file that `location.tracking_uri` names."""

    def __init__(self, settings: TrackerSettings) -> None:
        self._path = Path(settings.uri or settings.home / "runs.db").absolute()

    @property
    def address(self) -> str:
        """The file."""
        return str(self._path)

    def is_absent(self) -> bool:
        """Whether nobody wrote yet."""
        return not self._path.exists()

    def origin(self) -> str:
        """A name that the file got when it was made."""
        with self._open() as database:
            return database.execute("SELECT name FROM origin").fetchone()[0]

    def open_run(self, run: TrackedRun) -> str:
        """Runs are called by their keys, so a second call finds the first one's run."""
        inputs = {name: artifact.digest for name, artifact in run.inputs.items()}
        described = json.dumps({"name": run.name, "params": run.params, "inputs": inputs})
        with self._open() as database:
            database.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?, 'RUNNING', '', ?)",
                (run.key, run.parent_id, described),
            )
            database.executemany(
                "INSERT OR IGNORE INTO tags VALUES (?, ?, ?)",
                [(run.key, name, value) for name, value in run.tags.items()],
            )
        return run.key

    def position(self, run_id: str) -> str:
        """Of the last points."""
        with self._open() as database:
            query = "SELECT position FROM runs WHERE id = ?"
            return database.execute(query, (run_id,)).fetchone()[0]

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Points and position in one transaction; a point that is there stays."""
        with self._open() as database:
            database.executemany(
                "INSERT OR IGNORE INTO points VALUES (?, ?, ?, ?, ?)",
                [(run_id, p.name, p.step, repr(p.value), p.time_ms) for p in points],
            )
            database.execute("UPDATE runs SET position = ? WHERE id = ?", (position, run_id))

    def set_state(
        self, run_id: str, state: RunState, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        """Later tags win; a headline number that the run already has is left."""
        with self._open() as database:
            changed = database.execute("UPDATE runs SET state = ? WHERE id = ?", (state, run_id))
            if not changed.rowcount:
                raise TrackerRefusedError(f"{self._path} has no run {run_id}")
            database.executemany(
                "INSERT OR REPLACE INTO tags VALUES (?, ?, ?)",
                [(run_id, name, value) for name, value in tags.items()],
            )
            database.executemany(
                "INSERT INTO points SELECT ?1, ?2, 0, ?3, 0 "
                "WHERE NOT EXISTS (SELECT * FROM points WHERE run = ?1 AND name = ?2)",
                [(run_id, name, repr(value)) for name, value in metrics.items()],
            )

    def log_output(self, run_id: str, output: TrackedOutput) -> None:
        """The manifest's files, as one more tag."""
        files = sorted(output.manifest.files) if output.manifest else []
        with self._open() as database:
            database.execute(
                "INSERT OR REPLACE INTO tags VALUES (?, 'output.files', ?)",
                (run_id, json.dumps(files)),
            )

    def log_samples(
        self,
        run_id: str,
        steps: Mapping[int, Sequence[KeptSample]],
        times_ms: Mapping[int, int],
    ) -> None:
        """Not shown here: `rlhf show` writes a page of them."""

    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        """Copied beside the database."""
        target = self._path.with_suffix(".files") / run_id / path
        shutil.copytree(directory, target, dirs_exist_ok=True)

    def register(self, candidate: ModelCandidate) -> str:
        """A digest that is known keeps its number."""
        row = {"model": candidate.name, "digest": candidate.artifact.digest}
        with self._open() as database:
            database.execute(
                "INSERT OR IGNORE INTO versions SELECT COUNT(*) + 1, :model, :digest, :artifact, "
                "'' FROM versions WHERE model = :model",
                {**row, "artifact": candidate.artifact.model_dump_json()},
            )
            database.execute(
                "UPDATE versions SET beat = :beat WHERE model = :model AND digest = :digest",
                {**row, "beat": candidate.beat.model_dump_json() if candidate.beat else ""},
            )
            database.execute(
                "INSERT OR REPLACE INTO aliases VALUES (:model, :alias, :digest)",
                {**row, "alias": candidate.alias},
            )
            query = "SELECT number FROM versions WHERE model = :model AND digest = :digest"
            return str(database.execute(query, row).fetchone()[0])

    def incumbent(self, name: str, alias: str) -> Incumbent | None:
        """The version whose digest the alias has."""
        with self._open() as database:
            query = (
                "SELECT number, artifact, beat FROM versions JOIN aliases USING (model, digest) "
                "WHERE model = ? AND alias = ?"
            )
            found = database.execute(query, (name, alias)).fetchone()
        if found is None:
            return None
        number, artifact, beat = found
        return Incumbent(
            str(number),
            Artifact.model_validate_json(artifact),
            Artifact.model_validate_json(beat) if beat else None,
        )

    def aliased(self) -> dict[str, str]:
        """What the aliases point to."""
        with self._open() as database:
            rows = database.execute("SELECT model, alias, digest FROM aliases").fetchall()
        return {digest: f"{model}@{alias}" for model, alias, digest in rows}

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A transaction, in a file that is made when something is first told."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        opened = sqlite3.connect(self._path, timeout=30, isolation_level="IMMEDIATE")
        with closing(opened) as database, database:
            database.executescript(SCHEMA)
            database.execute("INSERT OR IGNORE INTO origin VALUES (1, ?)", (uuid.uuid4().hex,))
            yield database


def read_run(tracker: Any, run_id: str) -> dict[str, Any]:
    """A run as the contract tests read one."""
    with closing(sqlite3.connect(tracker.address)) as database:
        run = "SELECT state, parent FROM runs WHERE id = ?"
        state, parent = database.execute(run, (run_id,)).fetchone()
        tags = database.execute("SELECT name, value FROM tags WHERE run = ?", (run_id,))
        points = database.execute("SELECT name, step, value FROM points WHERE run = ?", (run_id,))
        return {
            "state": state,
            "parent": parent,
            "tags": dict(tags.fetchall()),
            "metrics": sorted((name, step, float(value)) for name, step, value in points),
        }
