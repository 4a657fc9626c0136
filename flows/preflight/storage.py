"""Checks of the store, of the tracking database, and of disk space for checkpoints.

File system type of a path on Linux.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from engines.config.recipe import Recipe
from flows.plan import plan_run
from flows.preflight.platform import memory_shortage
from infra.errors import ConfigError, StoreDeniedError, StoreError
from infra.store.storage import open_storage

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


NUM_CHECKPOINTS = 2
"""The newest checkpoint stays until the next one is complete."""
TRAINING_STAGES = ("sft", "reward_model", "preference", "rl_round")
"""Label prefixes of the stages that write step checkpoints."""
NOTHING_FORCED: Mapping[str, str] = {}


def check_store(uri: str) -> None:
    """Check that the store answers and allows access.

    Raises:
        ConfigError: names `location.store`.
        StoreError: its service failed or does not answer.
    """
    try:
        open_storage(uri).probe()
    except ConfigError as error:
        raise ConfigError("location.store", error.problem) from error
    except StoreDeniedError as error:
        raise ConfigError("location.store", str(error)) from error
    except StoreError as error:
        raise type(error)(f"location.store: {error}") from error
    except OSError as error:
        raise ConfigError(
            "location.store",
            f"got {uri}, which cannot be made or written to ({error.strerror}); need a directory "
            "of yours; name another",
        ) from error


def check_tracking_database(uri: str) -> None:
    """Check that an SQLite database of runs is on a disk with working locks.

    Raises:
        ConfigError: it is on a network disk.
    """
    if not uri.startswith("sqlite:///"):
        return
    kind = file_system_of(Path(uri.removeprefix("sqlite:///")).absolute())
    if kind in NETWORK:
        raise ConfigError(
            "location.tracking_uri",
            f"got {uri}, which is on {kind}; sqlite needs a local disk; set it, or "
            "MLFLOW_TRACKING_URI, to a server",
        )


def check_room(
    recipe: Recipe, checkpoint_bytes: int, force: Mapping[str, str] = NOTHING_FORCED
) -> None:
    """Check that the store has space for checkpoints, and the memory for the training.

    Raises:
        ConfigError: a stage has to train and there is too little, or `plan_run` failed.
    """
    shortage = memory_shortage(checkpoint_bytes, recipe.hardware)
    if shortage and _trains(recipe, force):
        raise ConfigError(
            "model.path",
            f"got {recipe.model.path}: {shortage}; take a smaller model or training.lora, or set "
            "RAY_ADDRESS to a cluster",
        )
    if "://" in recipe.store_uri:  # the free space of a bucket is unknown
        return
    num_checkpoints = NUM_CHECKPOINTS + recipe.keeps_average
    need_bytes = num_checkpoints * checkpoint_bytes
    free_bytes = shutil.disk_usage(recipe.store_uri).free
    if free_bytes < need_bytes and _trains(recipe, force):
        raise ConfigError(
            "location.store",
            f"need {num_checkpoints} x {checkpoint_bytes / 1e9:.1f} GB for checkpoints of "
            f"{recipe.model.path}, {recipe.store_uri} has {free_bytes / 1e9:.1f} GB free; free "
            "some, or name another place",
        )


def _trains(recipe: Recipe, force: Mapping[str, str]) -> bool:
    trains = [
        each for each in plan_run(recipe, force).stages if each.label.startswith(TRAINING_STAGES)
    ]
    return any(each.status not in {"hit", "likely_reuse"} for each in trains)
