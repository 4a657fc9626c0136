"""Resolves models that a recipe names by an alias in the registry, once, before a run."""

from functools import partial

from engines.config.recipe import Recipe
from flows.recipe.paths import registered_model
from flows.run.registry import open_tracker
from infra.errors import ArtifactError, ConfigError, ServiceError
from infra.redact import redact
from infra.store.storage import Storage
from infra.tracking.tracker import Tracker


def with_registered_models(recipe: Recipe, storage: Storage) -> Recipe:
    """Replace each model that is named by an alias with the directory of its files in the store.

    The fingerprint covers the files' bytes, so moving the alias changes it.

    Raises:
        ConfigError: the alias does not exist, or the store does not have the files.
        ServiceError: the registry does not answer.
    """
    return recipe.with_models(partial(_directory, open_tracker(recipe.location), storage))


def _directory(tracker: Tracker, storage: Storage, setting: str, path: str) -> str:
    asked = registered_model(setting, path)
    if asked is None:
        return path
    try:
        found = tracker.incumbent(asked.name, asked.alias)
    except ServiceError:
        raise
    except Exception as error:  # the tracker's own exceptions are not known here
        said = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
        raise ServiceError(
            f"{redact(tracker.address)} does not say which model is {path} ({said}); run it again "
            "once it answers"
        ) from error
    if found is None:
        raise ConfigError(
            setting,
            f"got {path}, and nothing bears that alias in {redact(tracker.address)}; need a "
            "registered model; run the recipe that promotes it, or name a directory or a hub id",
        )
    try:
        return str(storage.local_copy(found.artifact))
    except (ArtifactError, ValueError):  # ValueError: a version that no pipeline registered
        raise ConfigError(
            setting,
            f"got {path}, which is version {found.version} ({found.artifact.uri}); need its files "
            f"in {storage.uri}; take the store that has them (location.store), or name a directory",
        ) from None
