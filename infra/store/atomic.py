"""Files and directories that appear completely or not at all, also after a power loss.

Order: write under a temporary name in the same directory, fsync the content, rename (or link) to
the visible name, fsync the parent directory. Temporary names contain the stamp of their writer;
readers skip them, and `remove_abandoned` removes those of killed processes.
Does not promise: anything on file systems without atomic rename.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.faults import fault
from infra.store.process_stamp import find_stamp, is_dead, own_stamp

TEMPORARY_PREFIX = ".tmp-"
_ABANDONED_AFTER_S = 24 * 3600.0
"""A writer on another machine counts as dead after this time; on this machine at once."""


def temporary_sibling(path: Path) -> Path:
    """Return a new unique temporary path beside `path`; creates nothing."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{own_stamp()}-{uuid.uuid4().hex[:12]}")


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    _fsync(directory, os.O_DIRECTORY)


def _fsync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Make every file and every name below `directory`, and the directory itself, durable."""
    for parent, _, names in os.walk(directory, topdown=False, onerror=_raise):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                _fsync(path)
        fsync_directory(Path(parent))


def make_directories(directory: Path) -> None:
    """Create a directory and its parents, and make each name durable in its parent."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`; a reader sees either all old bytes or all new bytes."""
    with _written_temporary(path, data) as temporary:
        fault("atomic.before_rename")
        os.replace(temporary, path)
    fsync_directory(path.parent)


def create_exclusively(path: Path, data: bytes) -> bool:
    """Create `path` with its whole content; return False if the name exists.

    Of several processes exactly one gets True: a hard link fails where a rename would replace.
    """
    with _written_temporary(path, data) as temporary:
        fault("atomic.before_link")
        created = False
        with suppress(FileExistsError):
            os.link(temporary, path)
            created = True
    # Also after a lost race: the winner may die before the name is durable, and we rely on it.
    fsync_directory(path.parent)
    return created


def publish_directory(tmp: Path, final: Path) -> None:
    """Make everything in `tmp` durable, then rename it to `final` on the same file system.

    Raises:
        FileExistsError: `final` exists; `tmp` is unchanged.
    """
    fsync_tree(tmp)
    fault("atomic.before_publish")
    try:
        os.rename(tmp, final)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            fsync_directory(final.parent)  # the winner may die before the name is durable
            raise FileExistsError(errno.EEXIST, "already published", str(final)) from error
        raise
    fault("atomic.after_publish")
    fsync_directory(final.parent)
    if tmp.parent != final.parent:
        fsync_directory(tmp.parent)


def remove_directory(directory: Path) -> None:
    """Rename a directory, which may be absent, then delete it; a partial one is never visible."""
    trash = temporary_sibling(directory)
    try:
        directory.rename(trash)
    except FileNotFoundError:
        return
    fsync_directory(directory.parent)
    shutil.rmtree(trash)


def remove_abandoned(directory: Path) -> None:
    """Remove temporary entries of a dead writer, or untouched for a day."""
    for path in filter(is_abandoned, directory.glob(f"{TEMPORARY_PREFIX}*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_abandoned(path: Path) -> bool:
    """Return True if the writer named in the path is dead or did not touch it for a day."""
    try:
        stamp = find_stamp(path.name)
        silent_s = time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return False  # its writer finished after the listing
    return (stamp is not None and is_dead(stamp)) or silent_s > _ABANDONED_AFTER_S


@contextmanager
def _written_temporary(path: Path, data: bytes) -> Iterator[Path]:
    temporary = temporary_sibling(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        error.filename = error.filename or str(path)  # ENOSPC of a write names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _raise(error: OSError) -> None:
    # Without this, os.walk silently skips directories that it cannot read.
    raise error
