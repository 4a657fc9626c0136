"""Who bears the alias that a recipe's model is to win, as the registry of its tracker says.

Promises: asked once a run, when the model is there to be compared; a model that bears the alias
already is compared with what it took it from, so a run that is repeated asks for the same stages.
Does not promise that the answer still holds when the decision is told: whoever tells it looks
again.
"""

from dataclasses import replace
from functools import cached_property

from engines.config.plugins import TRACKERS
from flows.recipe.recipe import Recipe
from infra.errors import ArtifactError, ConfigError, ServiceError
from infra.redact import redact
from infra.services.stack import tracking_address
from infra.store.stage_spec import Artifact
from infra.store.storage import Storage
from infra.tracking.tracker import Incumbent, Tracker, TrackerSettings


def tracking_uri(recipe: Recipe) -> str:
    """The MLflow of a run: asked for, or started by `rlhf up`, or a database in the home."""
    return recipe.location.tracking_uri or tracking_address(recipe.home)


def open_tracker(recipe: Recipe) -> Tracker:
    """The tracker of a recipe; nothing is opened or asked yet."""
    return TRACKERS.load(recipe.location.tracker)(_settings(recipe))


def open_mirrors(recipe: Recipe) -> list[Tracker]:
    """What is told the same as the tracker, each in a place of its own; nothing is opened yet."""
    # The address is that of the tracker.
    settings = replace(_settings(recipe), uri=None)
    return [TRACKERS.load(name)(settings) for name in recipe.location.mirrors]


def _settings(recipe: Recipe) -> TrackerSettings:
    return TrackerSettings(recipe.home, tracking_uri(recipe), recipe.location.experiment)


class Registry:
    """Where a recipe's model would be registered.

    Args:
        recipe: names the model, the alias and the tracker.
        storage: of the run.
    """

    def __init__(self, recipe: Recipe, storage: Storage) -> None:
        self._gate, self._tracker = recipe.promote, open_tracker(recipe)
        self._storage = storage

    def incumbent(self, candidate: Artifact) -> Artifact | None:
        """The model that a candidate has to beat.

        Args:
            candidate: a model; its digest is empty while a plan does not know it.

        Returns:
            The model; None if there is none, and the minimum alone decides.

        Raises:
            ServiceError: the registry does not answer.
            ConfigError: the store of the run does not have the incumbent's files.
        """
        bearer = self._bearer
        if bearer is None:
            return None
        if bearer.artifact.digest == candidate.digest:
            return bearer.beat if bearer.beat and self._has(bearer.beat) else None
        if not self._has(bearer.artifact):
            raise ConfigError(
                "promote.alias",
                f"got {self._gate.alias!r}, which version {bearer.version} of "
                f"{self._gate.model_name} bears ({bearer.artifact.uri}); need its files in "
                f"{self._storage.uri}, to compare with it; take the store that has them "
                "(location.store), another promote.model_name, or the alias away from it",
            )
        return bearer.artifact

    @cached_property
    def _bearer(self) -> Incumbent | None:
        gate = self._gate
        try:
            return self._tracker.incumbent(gate.model_name, gate.alias)
        except ServiceError:  # says what to do
            raise
        except Exception as error:  # what a service that is away raises is its own affair
            said = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
            raise ServiceError(
                f"{redact(self._tracker.address)} does not say which version of {gate.model_name} "
                f"is {gate.alias} ({said}); nothing is promoted: run the recipe again once it "
                "answers, only the comparison is left"
            ) from error

    def _has(self, model: Artifact) -> bool:
        try:
            self._storage.verify(model, "manifest")
        except (ArtifactError, ValueError):  # the latter: a version that no pipeline registered
            return False
        return True
