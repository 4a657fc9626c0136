"""What a power loss could take away, read from the order of storage calls.

A kill leaves what the kernel was given; a power loss only what was synced. So whatever lies below a
name that readers see has to be durable when it gets that name, and the name soon after.
"""

from collections.abc import Callable, Iterable
from pathlib import PurePath

from storage_calls import Call

SYNCS = frozenset({"fsync", "fdatasync"})
NAMES = frozenset({"rename", "renameat", "renameat2", "link", "linkat"})


def not_durable(calls: Iterable[Call], visible: Callable[[str], bool]) -> list[str]:
    """Paths that could be lost or half there.

    Args:
        calls: of one process, in order.
        visible: whether readers look at a path that something is renamed or linked to.

    Returns:
        What was written or named, and not synced, when a visible name was given to it or to a
        directory above it; directories of visible names that were not synced afterwards.
    """
    dirty: set[str] = set()
    owed: set[str] = set()
    lost: list[str] = []
    for call in calls:
        *_, path = call.paths
        parent = str(PurePath(path).parent)
        if call.name in SYNCS:
            dirty.discard(path)
            owed.discard(path)
        elif call.name in NAMES:
            source = call.paths[0]
            moved = {p for p in dirty if p == source or p.startswith(f"{source}/")}
            if visible(path):
                lost += sorted(moved)
                owed.add(parent)
            if call.name.startswith("rename"):
                dirty -= moved
            dirty |= {path + p.removeprefix(source) for p in moved} | {parent}
        elif call.name.startswith(("unlink", "rmdir")):
            dirty.discard(path)
        else:
            # What is made is a name in its directory, too.
            dirty |= {path, parent} if call.name.startswith(("open", "creat", "mkdir")) else {path}
    return lost + sorted(owed)
