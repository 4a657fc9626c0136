"""The names of step checkpoints on disk, and how one gets a second place.

    <root>/step-00000050                  the checkpoint of step 50
           step-00000050-1a2b3c4d5e6f     the same, where other content had that name already

Promises: a checkpoint that is linked elsewhere stays there whatever happens to the first place;
what is linked was verified, byte by byte.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from infra.errors import ArtifactCorruptError, ArtifactNotFoundError
from infra.store.artifacts import verify_directory
from infra.store.atomic import make_directories, publish_directory, temporary_sibling

_NAME = re.compile(r"step-(\d{8,})(?:-[0-9a-f]{12})?")

_log = logging.getLogger(__name__)


def step_directories(root: Path) -> dict[int, list[Path]]:
    """What is published below a directory; whether it verifies is not said.

    Args:
        root: may not exist.

    Returns:
        By step, ascending: its directories; nearly always one.
    """
    steps: dict[int, list[Path]] = {}
    for path in sorted(root.glob("step-*")):
        match = _NAME.fullmatch(path.name)
        if match:
            steps.setdefault(int(match[1]), []).append(path)
    return dict(sorted(steps.items()))


def newest_valid(root: Path) -> tuple[int, Path, str] | None:
    """The newest checkpoint whose every byte is as it was written.

    Args:
        root: holds checkpoints; someone may remove old ones meanwhile.

    Returns:
        Step, directory and digest; None if there is none.

    Raises:
        OSError: one could not be read.
    """
    for step, paths in reversed(step_directories(root).items()):
        for path in paths:
            try:
                return step, path, verify_directory(path).digest
            except (ArtifactNotFoundError, ArtifactCorruptError, FileNotFoundError) as error:
                _log.warning("skipping the checkpoint of step %d: %s", step, error)
    return None


def link_checkpoint(source: Path, root: Path) -> None:
    """Give a published checkpoint a second place; its files are linked, since none ever changes.

    Args:
        source: the checkpoint.
        root: on the same file system; created if absent.

    Raises:
        OSError: the checkpoint was removed meanwhile, or the disk fails.
    """
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
