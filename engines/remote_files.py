"""Copies files between a stage's driver and its processes on other machines.

A path means a place on the driver's machine. A process that can read the driver's mark file shares
its disk, and nothing is copied. Any other process uses an actor on the driver's machine: it copies
a directory before it reads it, once for all processes of its machine, and sends the files it wrote.
Promises: a directory is copied whole or not at all; when `deliver` returns, the driver has the
files. Copies are removed when they have not been used for a day.
Does not promise to spare the driver's network: all bytes pass through its machine.
"""

import functools
import hashlib
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra import env
from infra.errors import DeadlineError
from infra.host.records import file_lock
from infra.store.atomic import (
    TEMPORARY_PREFIX,
    atomic_write_bytes,
    make_directories,
    publish_directory,
    remove_abandoned,
    remove_directory,
    temporary_sibling,
)

PART_BYTES = 32 * 2**20
ANSWER_DEADLINE_S = 600.0
"""Deadline of one request to the driver's machine, at most one part of a file."""
BRING_DEADLINE_S = 7200.0
"""How long to wait while another process of this machine copies the same directory."""
MARK = "driver"
_COPIES = "brought"
_DIGITS = 16


class Disk:
    """Access to the driver's disk for a process that shares it; `OtherDisk` copies files."""

    def local(self, path: Path) -> Path:
        """Return the path on this machine that corresponds to a path of the driver."""
        return path

    def bring(self, path: Path) -> Path:
        """Return a local directory with the content of an immutable directory of the driver."""
        return path

    def own(self, path: Path) -> Path:
        """Return a directory in which this process writes its part of `path`."""
        return path

    def deliver(self, own: Path, path: Path) -> None:
        """Copy the files of `own(path)` to the driver and remove it, unless it is `path` itself."""

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file of the driver atomically but not durably."""
        temporary = temporary_sibling(path)  # a reader may move its directory at once
        temporary.write_bytes(data)
        temporary.replace(path)

    def follow(self, path: Path, every_s: float) -> None:
        """Start copying `local(path)`, a log or heartbeat, to the driver every `every_s` s."""


class FileServer:
    """Ray actor on the driver's machine that reads and writes files for other machines."""

    def sizes(self, root: Path) -> dict[str, int]:
        """Return the size in bytes of each file below a directory, by relative path."""
        files = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {str(path.relative_to(root)): path.stat().st_size for path in files}

    def read(self, path: Path, start: int) -> bytes:
        """Return up to `PART_BYTES` of a file from byte `start`."""
        with path.open("rb") as file:
            file.seek(start)
            return file.read(PART_BYTES)

    def write(self, path: Path, start: int, data: bytes) -> None:
        """Write `data` into a file at byte `start`; 0 replaces the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.write(data)

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file atomically."""
        Disk().put(path, data)


class OtherDisk(Disk):
    """Access to the driver's disk from another machine, which keeps copies below `root`."""

    def __init__(self, server: Any, root: Path) -> None:
        self._server, self._root = server, root
        self._is_closed = threading.Event()
        make_directories(root.parent)
        remove_abandoned(root.parent)
        make_directories(root)

    def local(self, path: Path) -> Path:
        """Return the path below `root` that corresponds to `path`; creates its directory."""
        directory = self._root / hashlib.sha256(str(path.parent).encode()).hexdigest()[:_DIGITS]
        make_directories(directory)
        return directory / path.name

    def bring(self, path: Path) -> Path:
        """Copy the directory once per machine and return the copy."""
        final = self.local(path)
        with file_lock(final.with_name(f".{final.name}.lock"), BRING_DEADLINE_S):
            if not final.exists():
                unfinished = temporary_sibling(final)
                unfinished.mkdir()
                for name, size_bytes in self._ask("sizes", path).items():
                    self._fetch(path / name, unfinished / name, size_bytes)
                publish_directory(unfinished, final)
        return final

    def own(self, path: Path) -> Path:
        """Return a new temporary directory."""
        own = temporary_sibling(self.local(path))
        own.mkdir()
        return own

    def deliver(self, own: Path, path: Path) -> None:
        """Send all files of `own` to the driver and remove `own`."""
        for file in sorted(each for each in own.rglob("*") if each.is_file()):
            target = path / file.relative_to(own)
            with file.open("rb") as source:
                self._ask("write", target, 0, source.read(PART_BYTES))
                while data := source.read(PART_BYTES):
                    self._ask("write", target, source.tell() - len(data), data)
        remove_directory(own)

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file of the driver atomically."""
        self._ask("put", path, data)

    def follow(self, path: Path, every_s: float) -> None:
        """Start a thread that sends appended bytes, or a changed file whole if it did not grow."""
        threading.Thread(target=self._follow, args=(path, every_s), daemon=True).start()

    def close(self) -> None:
        """Stop the threads that follow files."""
        self._is_closed.set()

    def _follow(self, path: Path, every_s: float) -> None:
        from ray.exceptions import RayError

        sent_bytes, changed_at, local = 0, 0, self.local(path)
        while not self._is_closed.wait(every_s):
            # A failed attempt is repeated; the driver notices a missing heartbeat by itself.
            with suppress(OSError, RayError, DeadlineError):
                os.utime(self._root)
                if (state := local.stat()).st_mtime_ns == changed_at:
                    continue
                data = local.read_bytes()
                if len(data) > sent_bytes:
                    self._ask("write", path, sent_bytes, data[sent_bytes:])
                else:
                    self.put(path, data)
                sent_bytes, changed_at = len(data), state.st_mtime_ns

    def _fetch(self, path: Path, target: Path, size_bytes: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while file.tell() < size_bytes:
                data = self._ask("read", path, file.tell())
                if not data:
                    raise OSError(f"{path} of the driver became shorter while it was read")
                file.write(data)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayTaskError

        try:
            return ray.get(
                getattr(self._server, method).remote(*arguments), timeout=ANSWER_DEADLINE_S
            )
        except GetTimeoutError:
            raise DeadlineError(
                f"the driver's machine to {method} {arguments[0]}", ANSWER_DEADLINE_S
            ) from None
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, OSError) else error from None


@dataclass(frozen=True)
class DiskAccess:
    """Picklable data with which a process opens its driver's disk.

    The process shares the disk if it reads `token` in the file `mark`; otherwise `root` is its
    directory for copies from `server`, a `FileServer`.
    """

    mark: Path
    token: str
    root: Path
    server: Any

    def disk(self) -> Disk:
        """Return the driver's disk as this process reaches it."""
        with suppress(OSError):
            if self.mark.read_text() == self.token:
                return Disk()
        return OtherDisk(self.server, self.root)


_current = Disk()


def current() -> Disk:
    """Return the driver's disk as set by `use`; by default the disk of this process."""
    return _current


def use(access: DiskAccess | None) -> Disk:
    """Set `current` for this process; None means that it runs on the driver's machine."""
    global _current  # noqa: PLW0603  one per process, as its process group
    _current = Disk() if access is None else access.disk()
    return _current


def access_for(nodes: Sequence[str], own_node: str, directory: Path) -> DiskAccess | None:
    """Return what processes on `nodes` need to reach this disk; None if all are on `own_node`.

    The mark file is written to `directory`, that of the stage. Ray must be connected.
    """
    if set(nodes) <= {own_node}:
        return None
    token, server = _server(own_node, os.getpid())
    make_directories(directory)
    atomic_write_bytes(directory / MARK, token.encode())
    root = env.home() / _COPIES / f"{TEMPORARY_PREFIX}{token}"
    return DiskAccess(directory / MARK, token, root, server)


@functools.cache
def _server(node: str, process: int) -> tuple[str, Any]:  # noqa: ARG001  (a fork has none)
    """Start the file server of this process; it ends with the connection to Ray."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote(FileServer)
    options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": here}
    return uuid.uuid4().hex, remote.options(**options).remote()
