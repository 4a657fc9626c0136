"""The files that a stage's driver and its processes on other machines exchange.

A path means a place on the driver's machine. A process that finds the driver's mark there has the
same disk, and nothing is copied; any other asks an actor beside the driver. It brings a directory
before it reads it, once for all processes of its machine, and delivers what it wrote.
Promises: a directory is brought whole or not at all; when `deliver` returns, the driver has the
files. What was brought goes with the last day that somebody used it.
Does not promise: that only some of the bytes pass the driver's machine. All of them do.
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
from typing import Any, Protocol

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
"""How long the driver's machine may take for one part of a file."""
BRING_DEADLINE_S = 7200.0
"""How long another process of this machine may take to bring the same directory."""
MARK = "driver"
_BROUGHT = "brought"
_DIGITS = 16


class Disk(Protocol):
    """The driver's disk, as one process has it."""

    def local(self, path: Path) -> Path:
        """Where this process has, or would have, what the driver has at a path."""
        ...

    def bring(self, path: Path) -> Path:
        """A directory of the driver's that does not change any more, where it can be read."""
        ...

    def own(self, path: Path) -> Path:
        """A directory in which this process writes its part of what belongs to a path."""
        ...

    def deliver(self, own: Path, path: Path) -> None:
        """Hand over all files of `own`, which is used up where it is not `path`."""
        ...

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file of the driver's in one step."""
        ...

    def follow(self, path: Path, every_s: float) -> None:
        """Let the driver have what this process writes to `local(path)`, a log or a heartbeat."""
        ...


class SameDisk:
    """A `Disk` that this process has, too."""

    def local(self, path: Path) -> Path:
        """See `Disk`, as the rest."""
        return path

    def bring(self, path: Path) -> Path:
        """It is here."""
        return path

    def own(self, path: Path) -> Path:
        """It is the driver's."""
        return path

    def deliver(self, own: Path, path: Path) -> None:
        """They are there."""

    def put(self, path: Path, data: bytes) -> None:
        """See `Disk`."""
        _put(path, data)

    def follow(self, path: Path, every_s: float) -> None:
        """The driver reads the file itself."""


class FileServer:
    """The class of the Ray actor beside the driver."""

    def sizes(self, root: Path) -> dict[str, int]:
        """Bytes of each file below a directory, by its name there."""
        files = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {str(path.relative_to(root)): path.stat().st_size for path in files}

    def read(self, path: Path, start: int) -> bytes:
        """A part of a file."""
        with path.open("rb") as file:
            file.seek(start)
            return file.read(PART_BYTES)

    def write(self, path: Path, start: int, data: bytes) -> None:
        """Continue a file, or begin it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.write(data)

    def put(self, path: Path, data: bytes) -> None:
        """Replace a file in one step."""
        _put(path, data)


class OtherDisk:
    """A `Disk` of another machine.

    Args:
        server: handle of a `FileServer`.
        root: directory of this machine for what belongs to that driver.
    """

    def __init__(self, server: Any, root: Path) -> None:
        self._server, self._root = server, root
        self._is_closed = threading.Event()
        make_directories(root.parent)
        remove_abandoned(root.parent)
        make_directories(root)

    def local(self, path: Path) -> Path:
        """See `Disk`, as the rest."""
        place = hashlib.sha256(str(path.parent).encode()).hexdigest()[:_DIGITS]
        make_directories(self._root / place)
        return self._root / place / path.name

    def bring(self, path: Path) -> Path:
        """See `Disk`."""
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
        """See `Disk`."""
        own = temporary_sibling(self.local(path))
        own.mkdir()
        return own

    def deliver(self, own: Path, path: Path) -> None:
        """See `Disk`."""
        for file in sorted(each for each in own.rglob("*") if each.is_file()):
            self._send(file, path / file.relative_to(own))
        remove_directory(own)

    def put(self, path: Path, data: bytes) -> None:
        """See `Disk`."""
        self._ask("put", path, data)

    def follow(self, path: Path, every_s: float) -> None:
        """See `Disk`. A file that does not grow is replaced."""
        threading.Thread(target=self._follow, args=(path, every_s), daemon=True).start()

    def close(self) -> None:
        """End what follows files; it ends with the process otherwise."""
        self._is_closed.set()

    def _follow(self, path: Path, every_s: float) -> None:
        from ray.exceptions import RayError

        sent_bytes, changed_at, local = 0, 0, self.local(path)
        while not self._is_closed.wait(every_s):
            # The driver notices that it hears nothing.
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

    def _send(self, file: Path, path: Path) -> None:
        with file.open("rb") as source:
            self._ask("write", path, 0, source.read(PART_BYTES))
            while data := source.read(PART_BYTES):
                self._ask("write", path, source.tell() - len(data), data)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayTaskError

        try:
            answer = getattr(self._server, method).remote(*arguments)
            return ray.get(answer, timeout=ANSWER_DEADLINE_S)
        except GetTimeoutError:
            what = f"the driver's machine to {method} {arguments[0]}"
            raise DeadlineError(what, ANSWER_DEADLINE_S) from None
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, OSError) else error from None


@dataclass(frozen=True)
class DiskAccess:
    """How a process that a driver starts reaches its disk; travels to it.

    Attributes:
        mark: a file of the driver's.
        token: its content.
        root: directory of another machine for what it brings.
        server: handle of a `FileServer`.
    """

    mark: Path
    token: str
    root: Path
    server: Any

    def disk(self) -> Disk:
        """The driver's disk as this process has it."""
        with suppress(OSError):
            if self.mark.read_text() == self.token:
                return SameDisk()
        return OtherDisk(self.server, self.root)


def _put(path: Path, data: bytes) -> None:
    """Nothing is made durable: whoever waits for the file may move its directory at once."""
    temporary = temporary_sibling(path)
    temporary.write_bytes(data)
    temporary.replace(path)


_current: Disk = SameDisk()


def current() -> Disk:
    """The driver's disk as this process has it; without `use` it is that of the process."""
    return _current


def use(access: DiskAccess | None) -> Disk:
    """Set `current` for this process; None: it runs on the driver's own machine."""
    global _current  # noqa: PLW0603  one per process, as its process group
    _current = SameDisk() if access is None else access.disk()
    return _current


def access_for(nodes: Sequence[str], own_node: str, directory: Path) -> DiskAccess | None:
    """What processes on some nodes need to reach this process's disk. Ray must be connected.

    Args:
        nodes: ids of theirs.
        own_node: id of that of this process.
        directory: of the stage; gets the mark.

    Returns:
        None where all of them are on this one.
    """
    if set(nodes) <= {own_node}:
        return None
    token, server = _server(own_node, os.getpid())
    make_directories(directory)
    atomic_write_bytes(directory / MARK, token.encode())
    root = env.home() / _BROUGHT / f"{TEMPORARY_PREFIX}{token}"
    return DiskAccess(directory / MARK, token, root, server)


@functools.cache
def _server(node: str, process: int) -> tuple[str, Any]:  # noqa: ARG001  (a fork has none)
    """The one of this process: it serves all groups, and ends with the connection to Ray."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote(FileServer)
    options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": here}
    return uuid.uuid4().hex, remote.options(**options).remote()
