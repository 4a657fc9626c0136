"""Digests of large files outside the store, hashed once per (path, size, times, inode).

Promises: a file that was written to since is hashed again, because the kernel then changes one
of these; a cache that cannot be read or written costs time and nothing else.
Does not promise: to notice bits that the disk itself turns.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from infra import env
from infra.store.canonical import sha256_json

MIN_BYTES = 1 << 20
"""Smaller files are hashed faster than they are looked up."""
SETTLED_NS = 2_000_000_000
"""A file that was written a moment ago may be written again within one tick of its clock."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest_once(path: Path, compute: Callable[[], str]) -> str:
    """A file's sha256, from the cache in the home if the file is the one that was hashed.

    Args:
        path: a regular file.
        compute: hashes it now.

    Returns:
        64 hex digits.
    """
    status = path.stat()
    if status.st_size < MIN_BYTES:
        return compute()
    times = [status.st_mtime_ns, status.st_ctime_ns]
    key = sha256_json([os.fspath(path), status.st_size, *times, status.st_ino])
    record = env.home() / "digests" / key
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known = record.read_text(encoding="ascii")
        if _SHA256.fullmatch(known):
            return known
    digest = compute()
    if time.time_ns() - max(times) > SETTLED_NS and env.home().is_dir():
        with contextlib.suppress(OSError):
            record.parent.mkdir(exist_ok=True)
            temporary = record.with_name(f".tmp-{key}-{os.getpid()}")
            temporary.write_text(digest, encoding="ascii")
            os.replace(temporary, record)
    return digest
