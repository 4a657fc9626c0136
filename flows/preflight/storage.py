"""Checks of the store, of the tracking database, and of disk space for checkpoints."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from engines.config.recipe import Recipe
from flows.plan import plan_run
from flows.preflight.platform import memory_shortage
from infra.errors import ConfigError, StoreDeniedError, StoreError
from infra.host.mounts import NETWORK, file_system_of
from infra.store.storage import open_storage

NUM_CHECKPOINTS = 2
"""The newest stays until the next one is whole."""
TRAINING_STAGES = ("sft", "reward_model", "preference", "rl_round")
"""How the labels of those begin that write step checkpoints."""
NOTHING_FORCED: Mapping[str, str] = {}


def check_store(uri: str) -> None:
    """Refuse a store that does not answer or that denies access.

    Raises:
        ConfigError: names `location.store`.
        StoreError: its service does not answer, or failed.
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
    """Refuse a database of runs where its locks do not hold.

    Raises:
        ConfigError: it is a file on a network disk.
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
    """Refuse a store without room for its checkpoints, and memory without room for one.

    Args:
        recipe: what it names on the hub has its commit.
        force: by label of a stage that runs although it is done, its token.

    Raises:
        ConfigError: some stage is to train; says how much is needed, and how much there is; or of
            `plan_run`.
    """
    shortage = memory_shortage(checkpoint_bytes, recipe.hardware)
    if shortage and _trains(recipe, force):
        raise ConfigError(
            "model.path",
            f"got {recipe.model.path}: {shortage}; take a smaller model or training.lora, or set "
            "RAY_ADDRESS to a cluster",
        )
    if "://" in recipe.store_uri:  # a bucket does not say
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
    """True if some stage will write checkpoints."""
    planned = plan_run(recipe, force).stages
    trains = [each for each in planned if each.label.startswith(TRAINING_STAGES)]
    return any(each.status not in {"hit", "likely_reuse"} for each in trains)
