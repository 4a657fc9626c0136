"""The names of step checkpoints on disk, and links to a second place.

    <root>/step-00000050                  the checkpoint of step 50
           step-00000050-1a2b3c4d5e6f     another one of step 50, if that name was taken

A linked checkpoint stays in its second place when the first one is removed.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from infra.errors import ArtifactCorruptError, ArtifactNotFoundError
from infra.store.artifacts import verify_directory
from infra.store.atomic import (
    make_directories,
    publish_directory,
    remove_directory,
    temporary_sibling,
)

STEP_KIND = "step-checkpoint"
_NAME = re.compile(r"step-(\d{8,})(?:-[0-9a-f]{12})?")

_log = logging.getLogger(__name__)


def step_directories(root: Path) -> dict[int, list[Path]]:
    """Return the published directories by ascending step, a step's oldest first; not verified."""
    steps: dict[int, list[Path]] = {}
    for path in root.glob("step-*"):
        if match := _NAME.fullmatch(path.name):
            steps.setdefault(int(match[1]), []).append(path)
    for paths in steps.values():
        # No `stat` of a single directory: it may be gone by now.
        paths.sort(key=lambda path: path.stat().st_mtime_ns if len(paths) > 1 else 0)
    return dict(sorted(steps.items()))


def newest_valid(root: Path, last: int | None = None) -> tuple[int, Path, str] | None:
    """Return step, directory and digest of the newest intact checkpoint up to step `last`, or None.

    Raises:
        ArtifactCorruptError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[str] = []
    for step in reversed([s for s in step_directories(root) if last is None or s <= last]):
        try:
            return step, *verify_step(root, step)
        except (ArtifactNotFoundError, ArtifactCorruptError) as error:
            _log.warning("skipping the checkpoint of step %d: %s", step, error)
            damaged.append(f"step {step} ({error})")
    if damaged:
        raise ArtifactCorruptError(f"no valid step in {root}: {', '.join(damaged)}")
    return None


def remove_steps_after(root: Path, last: int) -> None:
    """Remove checkpoints of steps after `last`, so that retention keeps the valid ones."""
    for step, paths in step_directories(root).items():
        for path in paths if step > last else ():
            _log.warning("removing the checkpoint of step %d: the journal ends at %d", step, last)
            remove_directory(path)


def verify_step(root: Path, step: int) -> tuple[Path, str]:
    """Verify every byte of a step's checkpoint; return its directory and digest.

    Raises:
        ArtifactNotFoundError: it does not exist.
        ArtifactCorruptError: its content differs from the manifest.
    """
    # A kill after a replacement was published and before the old one was removed leaves both.
    *others, path = step_directories(root).get(step) or [root / f"step-{step:08d}"]
    try:
        return path, verify_directory(path, kind=STEP_KIND).digest
    except ArtifactCorruptError:
        if not others:
            raise
        return others[-1], verify_directory(others[-1], kind=STEP_KIND).digest


def link_checkpoint(source: Path, root: Path) -> None:
    """Hard-link a verified checkpoint into another root; `OSError` if it vanishes meanwhile."""
    final = root / source.name
    if final.exists():
        return
    make_directories(root)
    temporary = temporary_sibling(final)
    try:
        shutil.copytree(source, temporary, copy_function=os.link)
        publish_directory(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
