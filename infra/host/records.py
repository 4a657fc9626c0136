"""The files that processes of one host leave for each other: records, locks, logs.

Promises: a record appears whole or not at all, in a directory closed to others; a lock is freed by
the kernel when its holder dies, so none is ever stale.
Does not promise: locks across hosts; the directory is expected on a local disk.
"""

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from infra.errors import ConfigError, ServiceError
from infra.store.atomic import atomic_write_bytes
from infra.waiting import wait_for

Record = TypeVar("Record", bound=BaseModel)


@contextlib.contextmanager
def file_lock(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file of this host; the kernel frees it if we die.

    Args:
        path: created if absent; nothing is written to it.
        deadline_s: how long to wait for another holder, in seconds.

    Yields:
        None: while the lock is held.

    Raises:
        DeadlineError: another process held it all the time.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquired() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        wait_for(acquired, f"the lock {path}, held by another process", deadline_s)
        yield
    finally:
        os.close(descriptor)


def make_place(place: Path, setting: str, remedy: str) -> None:
    """Make a directory of what a run keeps, or say in one line why it cannot be.

    Args:
        place: the directory.
        setting: what names it, for the error.
        remedy: what else could name it.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(place, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
    if reason:
        raise ConfigError(
            setting,
            f"got {place}, which cannot be made or written to ({reason}); need a directory of "
            f"yours; {remedy}",
        )


def log_tail(path: Path, num_lines: int = 15, noise: str | None = None) -> str:
    """The last lines of a log, each on a new indented line; empty if there is none.

    Args:
        path: of the log.
        num_lines: how many.
        noise: regular expression that is found in lines which are left out.

    Returns:
        The lines.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    kept = [line for line in lines if noise is None or not re.search(noise, line)]
    return "".join(f"\n    {line}" for line in kept[-num_lines:])


def save_record(path: Path, record: BaseModel) -> None:
    """Keep a record; its directory, if it is new, is closed to others."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic_write_bytes(path, record.model_dump_json(indent=2).encode())


def load_record(path: Path, model: type[Record]) -> Record | None:
    """Read a record.

    Args:
        path: the file.
        model: what it holds.

    Returns:
        The record; None if there is no such file.

    Raises:
        ServiceError: the file is no such record.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ServiceError(f"{path} is not a {model.__name__} ({reason}); remove it") from error
