"""File system type of a path on Linux."""

import re
from pathlib import Path

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "afs", "fuse.sshfs", "fuse.glusterfs"})
"""File systems on which database locks are unreliable."""
MOUNTS = Path("/proc/self/mounts")


def file_system_of(path: Path) -> str | None:
    """Return the type (`ext4`, `nfs4`) of an absolute path's file system; None without `/proc`."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = path.resolve()
    best, kind = -1, None
    for line in lines:
        mounted, found = map(_unescaped, line.split(" ")[1:3])
        # A later mount on the same path hides an earlier one.
        if place.is_relative_to(mounted) and len(mounted) >= best:
            best, kind = len(mounted), found
    return kind


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
