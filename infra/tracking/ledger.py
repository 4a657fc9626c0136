"""Local record of what was sent to a tracking server, one small file per run.

`<home>/tracking/<server>/` has `pending/<key>.json` for a run that is not completely sent,
`settled/<key>.json` for a completely sent run, `aside/<key>` as a mark on a pending run whose
sending failed or took too long, and `origin`, which names the server.
Promises: an entry survives any kill; a settled entry is settled for one server and one store only;
losing the directory causes no duplicates.
Does not promise: to match the server, which is queried before something is sent.
"""

import socket
from collections.abc import Iterable, Iterator
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
    """The process that reports a run."""

    host: str
    process: ProcessIdentity

    @classmethod
    def this_process(cls) -> Self:
        """Return the identity of this process."""
        return cls(host=socket.gethostname(), process=own_identity())

    def is_gone(self) -> bool:
        """True if the process is known to have ended; False for a process of another host."""
        return self.host == socket.gethostname() and not is_alive(self.process)


class RunEntry(FrozenModel):
    """A pipeline run or a stage as it is sent to a tracker, without journal records."""

    key: str
    """Identifies the run on the server; hex digits."""
    name: str
    fingerprint: str = ""
    """Stages only; empty for a pipeline run."""
    generation: int = 0
    """Stages only: number of the generation's first attempt."""
    parent: str = ""
    """Stages only: key of the pipeline run that computed it."""
    owner: Owner
    params: dict[str, Any] = {}
    tags: dict[str, str] = {}
    inputs: dict[str, Artifact] = {}
    state: RunState = "RUNNING"
    output: Artifact | None = None
    """Committed stages only."""
    committed_at: str = ""
    """Committed stages only: UTC, ISO 8601."""
    metrics: dict[str, float] = {}
    stages: dict[str, str] = {}
    """Pipeline runs only: keys of the stages it used, by label."""
    files: Path | None = None
    """Pipeline runs only: directory of the report."""
    run_id: str = ""
    """Id of the run on the server; empty before it is known."""
    told: str = ""
    """State and journal position that were sent last."""

    def committed(self, record: CommitRecord) -> "RunEntry":
        """Return the entry of the stage as finished, with its result."""
        result = {
            "state": "FINISHED",
            "output": record.artifact,
            "metrics": record.metrics,
            "committed_at": record.committed_at,
        }
        entry = self.adopting(record.adopted) if record.adopted else self
        return entry.model_copy(update=result)

    def adopting(self, adopted: Adoption) -> "RunEntry":
        """Return the entry with tags for the work that the stage continues."""
        tags = {"adopted": str(adopted), "adopted.fingerprint": adopted.fingerprint}
        return self.model_copy(update={"tags": self.tags | tags})


class Ledger:
    """Keeps the entries of one home for one tracker address and one store, on disk."""

    def __init__(self, home: Path, address: str, store_uri: str) -> None:
        self.directory = home / "tracking" / sha256_json([address, store_uri])[:_DIGITS]

    def find(self, key: str) -> RunEntry | None:
        """Return the entry of a run, pending or settled; None if there is none."""
        return self._read("pending", key) or self._read("settled", key)

    def is_settled(self, key: str) -> bool:
        """True if a run was completely sent to the server."""
        return self._path("settled", key).exists() and not self._path("pending", key).exists()

    def pending(self) -> Iterator[RunEntry]:
        """Yield the runs that may not be completely sent."""
        yield from _entries(sorted((self.directory / "pending").glob("*.json")))

    def put(self, entry: RunEntry) -> None:
        """Store an entry as pending; replaces an older one with its key."""
        save_record(self._path("pending", entry.key), entry)

    def settle(self, entry: RunEntry) -> None:
        """Mark a run as completely sent."""
        save_record(self._path("settled", entry.key), entry)
        self._path("pending", entry.key).unlink(missing_ok=True)
        (self.directory / "aside" / entry.key).unlink(missing_ok=True)

    def set_aside(self, key: str) -> None:
        """Mark a run to be sent last, because sending it failed or delayed the others."""
        path = self.directory / "aside" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def aside(self) -> set[str]:
        """Return the keys of the runs that are sent last."""
        return {path.name for path in (self.directory / "aside").glob("*")}

    def check_origin(self, origin: str) -> bool:
        """Record the server's origin; True if it is a new one, so that all runs become pending."""
        path = self.directory / "origin"
        if path.exists() and path.read_text(encoding="utf-8") == origin:
            return False
        self.forget()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, origin.encode())
        return True

    def forget(self) -> None:
        """Make all settled runs pending again."""
        for path in (self.directory / "settled").glob("*.json"):
            entry = self._read("settled", path.stem)
            if entry is not None and not self._path("pending", entry.key).exists():
                self.put(entry.model_copy(update={"run_id": "", "told": ""}))
            path.unlink()

    def _path(self, room: str, key: str) -> Path:
        return self.directory / room / f"{key}.json"

    def _read(self, room: str, key: str) -> RunEntry | None:
        return next(_entries([self._path(room, key)]), None)


def told_runs(home: Path) -> Iterator[RunEntry]:
    """Yield every run and stage in the ledgers of a home, pending or settled."""
    yield from _entries(sorted((home / "tracking").glob("*/*/*.json")))


def _entries(paths: Iterable[Path]) -> Iterator[RunEntry]:
    for path in paths:
        # Settled meanwhile; or of another version, which the next run that uses the stage replaces.
        with suppress(FileNotFoundError, ValidationError):
            yield RunEntry.model_validate_json(path.read_bytes())
