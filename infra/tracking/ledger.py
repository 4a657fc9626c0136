"""What a tracking server was told, and what it is still to be told: one small file per run.

`<home>/tracking/<server>/pending/<key>.json` is a run that the server does not know the end of,
`settled/<key>.json` one that it was told everything about, `aside/<key>` is there for a pending one
that failed or took too long, `origin` names what answered then.
Promises: an entry that was put survives any kill; what is settled is settled for one server and
one store only; losing the whole directory costs a look at the server and doubles nothing.
Does not promise to be the truth about the server: that is what the server itself keeps, and it
is asked whenever something is told.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from infra.frozen_model import FrozenModel
from infra.host.processes import ProcessIdentity, is_alive, own_identity
from infra.host.records import save_record
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import sha256_json
from infra.store.stage_spec import Adoption, Artifact, CommitRecord
from infra.tracking.tracker import RunState

_DIGITS = 16


class Owner(FrozenModel):
    """The process that tells a run's story."""

    host: str
    process: ProcessIdentity

    @classmethod
    def this_process(cls) -> Self:
        """This one."""
        return cls(host=socket.gethostname(), process=own_identity())

    def is_gone(self) -> bool:
        """Whether it has ended, as far as can be known; False for a process of another host."""
        return self.host == socket.gethostname() and not is_alive(self.process)


class RunEntry(FrozenModel):
    """A pipeline run or a stage, and how it stands."""

    key: str
    """Identifies the run on the server; hex digits."""
    name: str
    fingerprint: str = ""
    """Of a stage; empty for a pipeline run."""
    generation: int = 0
    """Of a stage: number of the generation's first attempt in the stage's log."""
    parent: str = ""
    """Key of the pipeline run that computed the stage."""
    owner: Owner
    params: dict[str, Any] = {}
    tags: dict[str, str] = {}
    inputs: dict[str, Artifact] = {}
    state: RunState = "RUNNING"
    output: Artifact | None = None
    """Of a committed stage."""
    committed_at: str = ""
    """Of a committed stage: UTC, ISO 8601."""
    metrics: dict[str, float] = {}
    """Headline numbers."""
    stages: dict[str, str] = {}
    """Of a pipeline run: keys of the stages it used, by label."""
    files: Path | None = None
    """Of a pipeline run: directory of its report."""
    run_id: str = ""
    """The server's name for it, once it has one."""
    told: str = ""
    """State and journal position that the server was told last."""

    def committed(self, record: CommitRecord) -> "RunEntry":
        """The same stage with its result."""
        at = record.committed_at
        result = {"output": record.artifact, "metrics": record.metrics, "committed_at": at}
        return self.adopting(record.adopted).model_copy(update={"state": "FINISHED", **result})

    def adopting(self, adopted: Adoption | None) -> "RunEntry":
        """The same stage with whose work it continues; its rows begin with that work's."""
        told = (
            {"adopted": str(adopted), "adopted.fingerprint": adopted.fingerprint} if adopted else {}
        )
        return self.model_copy(update={"tags": {**self.tags, **told}})


class Ledger:
    """The entries of one home about one server and one store.

    Args:
        home: holds the ledgers.
        address: of the tracker.
        store_uri: of the store whose stages are told.
    """

    def __init__(self, home: Path, address: str, store_uri: str) -> None:
        self.directory = home / "tracking" / sha256_json([address, store_uri])[:_DIGITS]

    def find(self, key: str) -> RunEntry | None:
        """A run that was put here once."""
        return self._read("pending", key) or self._read("settled", key)

    def is_settled(self, key: str) -> bool:
        """Whether the server was told everything about a run."""
        return self._path("settled", key).exists() and not self._path("pending", key).exists()

    def pending(self) -> Iterator[RunEntry]:
        """The runs that something may have to be told about."""
        for path in sorted((self.directory / "pending").glob("*.json")):
            entry = self._read("pending", path.stem)
            if entry is not None:
                yield entry

    def put(self, entry: RunEntry) -> None:
        """Keep an entry until it is settled; an older one of its key is replaced."""
        save_record(self._path("pending", entry.key), entry)

    def settle(self, entry: RunEntry) -> None:
        """The server was told everything about a run."""
        save_record(self._path("settled", entry.key), entry)
        self._path("pending", entry.key).unlink(missing_ok=True)
        (self.directory / "aside" / entry.key).unlink(missing_ok=True)

    def set_aside(self, key: str) -> None:
        """A run failed while the server answered, or kept the others waiting: it comes last."""
        path = self.directory / "aside" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def aside(self) -> set[str]:
        """Keys of the runs that come last."""
        return {path.name for path in (self.directory / "aside").glob("*")}

    def check_origin(self, origin: str) -> bool:
        """Whether another server answers than before, which has yet to be told everything."""
        path = self.directory / "origin"
        if path.exists() and path.read_text(encoding="utf-8") == origin:
            return False
        self.forget()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, origin.encode())
        return True

    def forget(self) -> None:
        """Nothing was told: what was settled is pending again."""
        for path in (self.directory / "settled").glob("*.json"):
            entry = self._read("settled", path.stem)
            if entry is not None and not self._path("pending", entry.key).exists():
                self.put(entry.model_copy(update={"run_id": "", "told": ""}))
            path.unlink()

    def _path(self, room: str, key: str) -> Path:
        return self.directory / room / f"{key}.json"

    def _read(self, room: str, key: str) -> RunEntry | None:
        try:
            return RunEntry.model_validate_json(self._path(room, key).read_bytes())
        except (FileNotFoundError, ValidationError):
            # Of another version: the next run that uses the stage puts it anew.
            return None


def told_runs(home: Path) -> Iterator[RunEntry]:
    """Every run and stage that trackers of a home were told of, or are to be."""
    for path in sorted((home / "tracking").glob("*/*/*.json")):
        with suppress(FileNotFoundError, ValidationError):  # settled meanwhile; another version
            yield RunEntry.model_validate_json(path.read_bytes())
