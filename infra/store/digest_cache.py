"""Cache of the sha256 of large files outside the store, by (path, size, times, inode).

A modified file is hashed again, because the kernel then changes one of these. A cache that cannot
be read or written costs only time. Bits that flip on the disk are not noticed.
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
"""Hashing a smaller file is faster than the cache lookup."""
SETTLED_NS = 2_000_000_000
"""A younger file is not cached: another write may fall into the same tick of its timestamp."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest_once(path: Path, compute: Callable[[], str]) -> str:
    """Return the sha256 of a regular file (64 hex digits), from the cache in the home if known."""
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
