"""Files and directories that appear whole or not at all, also after a power loss.

The order that holds it: write under a temporary name in the same directory, fsync the content,
rename (or link) to the visible name, fsync the directory that holds the name.
Temporary names start with `TEMPORARY_PREFIX` and name their writer; readers skip them, and what a
killed process left is removed by `remove_abandoned`.
Not promised: anything on file systems without atomic rename.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.faults import fault
from infra.store.process_stamp import find_stamp, is_dead, own_stamp

TEMPORARY_PREFIX = ".tmp-"
_ABANDONED_AFTER_S = 24 * 3600.0
"""A writer on another machine is taken for dead after this; on this one at once."""


def temporary_sibling(path: Path) -> Path:
    """A fresh name beside `path`; nothing is created."""
    unique = f"{own_stamp()}-{uuid.uuid4().hex[:12]}"
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{unique}")


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Make every file and every name below `directory` durable, itself included."""
    for parent, _, names in os.walk(directory, topdown=False, onerror=_raise):
        for name in names:
            path = Path(parent, name)
            if path.is_symlink() or not path.is_file():
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(parent))


def make_directories(directory: Path) -> None:
    """Create a directory and its parents, each made durable in its own parent."""
    missing = [d for d in (directory, *directory.parents) if not d.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`: a reader sees the old bytes or the new ones, whole."""
    with _written_temporary(path, data) as temporary:
        fault("atomic.before_rename")
        os.replace(temporary, path)
    fsync_directory(path.parent)


def create_exclusively(path: Path, data: bytes) -> bool:
    """Create `path` with its whole content, unless the name is taken.

    Of several processes that try at once exactly one gets True. A hard link fails where a
    rename would replace, which makes "whole" and "first" one step.
    """
    with _written_temporary(path, data) as temporary:
        fault("atomic.before_link")
        try:
            os.link(temporary, path)
            created = True
        except FileExistsError:
            created = False
    # Also after a lost race: whoever won may die before the name is durable, and we build on it.
    fsync_directory(path.parent)
    return created


def publish_directory(tmp: Path, final: Path) -> None:
    """Make everything in `tmp` durable, then give it its visible name in one step.

    Args:
        tmp: a complete directory on the same file system as `final`.
        final: the visible name; its parent exists.

    Raises:
        FileExistsError: `final` is taken; `tmp` is untouched.
    """
    fsync_tree(tmp)
    fault("atomic.before_publish")
    try:
        os.rename(tmp, final)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            fsync_directory(final.parent)  # whoever won may die before the name is durable
            raise FileExistsError(errno.EEXIST, "already published", str(final)) from error
        raise
    fault("atomic.after_publish")
    fsync_directory(final.parent)
    if tmp.parent != final.parent:
        fsync_directory(tmp.parent)


def remove_directory(directory: Path) -> None:
    """Take a directory's name away in one step, then its content: nobody finds half of it.

    Args:
        directory: may be absent.

    Raises:
        OSError: its name could not be taken away, or some of its content stays, under another.
    """
    trash = temporary_sibling(directory)
    try:
        directory.rename(trash)
    except FileNotFoundError:
        return
    fsync_directory(directory.parent)
    shutil.rmtree(trash)


def remove_abandoned(directory: Path) -> None:
    """Remove temporary entries whose writer is dead, and those that nobody touched for a day.

    Args:
        directory: holds them; what cannot be removed stays for the next time.
    """
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        if is_abandoned(path):
            _remove(path)


def is_abandoned(path: Path) -> bool:
    """Whether the writer that a name tells of is dead, or has not touched it for a day."""
    try:
        stamp = find_stamp(path.name)
        silent_s = time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return False  # its writer finished between the listing and the look
    return (stamp is not None and is_dead(stamp)) or silent_s > _ABANDONED_AFTER_S


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _written_temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A durable file beside `path` holding `data`; removed at the end if it is still there."""
    temporary = temporary_sibling(path)
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk does not say which
            raise
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _raise(error: OSError) -> None:
    # os.walk skips directories it cannot read unless told otherwise.
    raise error
