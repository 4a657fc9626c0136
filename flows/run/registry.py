"""The registered model that a run must beat, and the gate of RL rounds.

Promises: a `Registry` looks its incumbent up once. If the run's model already has the alias, it is
compared with its predecessor, so a repeated run requests the same stages. The gate's decision is a
pure function of committed stages and the recipe's thresholds, so a repeated run decides the same. A
rejected round stays committed, and later stages use the policy before it.
Does not promise: that the registry's answer is still valid at promotion; the tracker checks it
again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

from engines.config.plugins import TRACKERS
from engines.config.recipe import DiagnosisConfig, LocationConfig
from engines.config.sections import PromoteConfig
from engines.config.stages.rl import RLRoundStageConfig
from flows.diagnosis.diagnosis import rejecting, symptoms
from flows.diagnosis.findings import Finding, stage_views
from infra.errors import ArtifactError, ConfigError, ServiceError, SickRunError
from infra.redact import redact
from infra.services.stack import tracking_address
from infra.store.stage_spec import Artifact
from infra.store.storage import Storage
from infra.tracking.journal import StageHistory
from infra.tracking.tracker import Incumbent, Tracker, TrackerSettings
from tasks.runner.run import StageResult


def tracking_uri(location: LocationConfig) -> str:
    """Return the address of a run's MLflow: configured, of `rlhf up`, or the home's database."""
    return location.tracking_uri or tracking_address(location.home_directory)


def open_tracker(location: LocationConfig) -> Tracker:
    """Return the tracker of a run; it connects on first use."""
    settings = TrackerSettings(location.home_directory, tracking_uri(location), location.experiment)
    return TRACKERS.load(location.tracker)(settings)


def open_mirrors(location: LocationConfig) -> list[Tracker]:
    """Return the mirrors of a run, which get the same records as the tracker."""
    # The URI is only for the tracker.
    settings = TrackerSettings(location.home_directory, None, location.experiment)
    return [TRACKERS.load(name)(settings) for name in location.mirrors]


@contextmanager
def asking(tracker: Tracker, what: str, then: str) -> Iterator[None]:
    """Scope that turns a tracker's errors, whose types are unknown here, into ServiceError.

    `what` is the question, which the error's text repeats; the text ends with `then`.
    """
    try:
        yield
    except ServiceError:
        raise
    except Exception as error:  # the boundary to a plugin
        said = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
        raise ServiceError(
            f"{redact(tracker.address)} does not say {what} ({said}); {then}"
        ) from error


def find_registered(tracker: Tracker, name: str, alias: str, then: str) -> Incumbent | None:
    """Return the version of a registered model that has an alias; None if no version has it.

    Raises:
        ServiceError: the registry does not answer; the text ends with `then`.
    """
    with asking(tracker, f"which version of {name} is {alias}", then):
        return tracker.incumbent(name, alias)


class Registry:
    """Looks up the registered model with the recipe's `promote` name and alias."""

    def __init__(self, promote: PromoteConfig, tracker: Tracker, storage: Storage) -> None:
        self._gate, self._tracker, self._storage = promote, tracker, storage

    def incumbent(self, candidate: Artifact) -> Artifact | None:
        """Return the incumbent, or if that is the candidate, its known predecessor; else None.

        Raises:
            ServiceError: the registry does not answer.
            ConfigError: the store of the run does not have the incumbent's files.
        """
        found = self._incumbent
        if found is None:
            return None
        if found.artifact.digest == candidate.digest:
            return found.beat if found.beat and self._has(found.beat) else None
        if not self._has(found.artifact):
            raise ConfigError(
                "promote.alias",
                f"got {self._gate.alias!r}, which points to version {found.version} of "
                f"{self._gate.model_name} ({found.artifact.uri}); need its files in "
                f"{self._storage.uri}, to compare with it; set location.store to the store that "
                "has them, set another promote.model_name, or remove the alias from that version",
            )
        return found.artifact

    @cached_property
    def _incumbent(self) -> Incumbent | None:
        then = (
            "nothing is promoted: run the recipe again once it answers, only the comparison is left"
        )
        return find_registered(self._tracker, self._gate.model_name, self._gate.alias, then)

    def _has(self, model: Artifact) -> bool:
        try:
            self._storage.verify(model, "manifest")
        except (ArtifactError, ValueError):  # ValueError: a version that no pipeline registered
            return False
        return True


class RoundGate:
    """Accepts or rejects RL rounds, in order; `rejected` has the symptoms by stage label."""

    def __init__(
        self,
        thresholds: DiagnosisConfig,
        history: StageHistory,
        warn: Callable[[str, str], None] = lambda label, text: None,  # noqa: ARG005
    ) -> None:
        self._thresholds, self._history, self._warn = thresholds, history, warn
        self._accepted: list[StageResult] = []
        self.rejected: dict[str, str] = {}

    def accepts(self, trained: StageResult, evaluated: StageResult) -> bool:
        """Return True if the next stages use a stage's policy, or if the stage is only planned.

        Raises:
            SickRunError: a symptom occurred for which the recipe ends the run.
        """
        results = [*self._accepted, trained, evaluated]
        shown: list[Finding] = []
        is_asked = self._thresholds.end_run or self._thresholds.reject_round
        if is_asked and all(each.artifact.digest for each in results):
            views = stage_views(self._history, [each.fingerprint for each in results])
            rounds = [view for view in views if isinstance(view.config, RLRoundStageConfig)]
            shown = symptoms(rounds, views, self._thresholds)
        found = {each.symptom: each for each in shown}
        for name in self._thresholds.end_run:
            if name in found:
                raise SickRunError(
                    f"{trained.label}: {name}: {found[name].text} "
                    f"({'; '.join(map(str, found[name].evidence))}); diagnosis.end_run lists "
                    f"{name}; first advice: {found[name].next[0]}; or remove {name} there, and run "
                    "again"
                )
        whys = [f"{each.symptom}: {each.text}" for each in rejecting(shown, self._thresholds)]
        if not whys:
            self._accepted += [trained, evaluated]
            return True
        self.rejected[trained.label] = why = "; ".join(whys)
        taken = "the model that the run began with"
        if self._accepted:
            taken = f"the policy of {self._accepted[-2].label}"
        self._warn(trained.label, f"rejected: {why}; what follows takes {taken}")
        return False
