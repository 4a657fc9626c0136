"""Which file system a path is on, as Linux tells it.

Does not promise: an answer where there is no `/proc`; then nothing is known.
"""

import re
from pathlib import Path

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "afs", "fuse.sshfs", "fuse.glusterfs"})
"""On which locks of a database do not hold."""
MOUNTS = Path("/proc/self/mounts")


def file_system_of(path: Path) -> str | None:
    """Kind of the file system that a path is on, or would be if it were made.

    Args:
        path: absolute.

    Returns:
        As in `/proc/mounts`, `ext4` or `nfs4`; None where nothing says it.
    """
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = path.resolve()
    best, kind = -1, None
    for line in lines:
        mounted, found = map(_unescaped, line.split(" ")[1:3])
        # Of two mounts on one place the later one is seen.
        if place.is_relative_to(mounted) and len(mounted) >= best:
            best, kind = len(mounted), found
    return kind


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
