"""Files that processes of one host share: records, locks, logs.

A record appears completely or not at all; a new directory is for its user only. The kernel
frees a lock when its holder dies. Locks work on a local disk only, not across hosts.
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
    """Hold an exclusive lock on a file of this host; the kernel frees it if this process dies.

    Raises:
        DeadlineError: another process held it for `deadline_s` seconds.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for(
            lambda: lock_now(descriptor), f"the lock {path}, held by another process", deadline_s
        )
        yield
    finally:
        os.close(descriptor)


def lock_now(descriptor: int) -> bool:
    """Lock an open file exclusively until it is closed; return False at once if it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_place(place: Path, setting: str, remedy: str) -> None:
    """Create a directory if absent; `ConfigError` about `setting` if impossible or not writable."""
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
    """Return a log's last lines, indented, except matches of the regex `noise`; empty if absent."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    kept = [line for line in lines if noise is None or not re.search(noise, line)]
    return "".join(f"\n    {line}" for line in kept[-num_lines:])


def save_record(path: Path, record: BaseModel) -> None:
    """Write a record atomically; a new directory is accessible to this user only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic_write_bytes(path, record.model_dump_json(indent=2).encode())


def load_record(path: Path, model: type[Record]) -> Record | None:
    """Return a record; None if there is no file.

    Raises:
        ServiceError: the content is invalid.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ServiceError(
            f"{path} is not a {model.__name__} ({error.errors()[0]['msg']}); remove it"
        ) from error
