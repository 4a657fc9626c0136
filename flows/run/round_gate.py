"""The gate that accepts or rejects the policy of a finished RL round.

Promises: the decision is a pure function of committed stages and the recipe's thresholds, so a
repeated run decides the same. A rejected round stays committed, and later stages use the policy
before it. With other thresholds, only stages that get another policy run again.
"""

from collections.abc import Callable, Sequence

from engines.config.diagnosis import DiagnosisConfig
from engines.config.stages.rl import RLRoundStageConfig
from flows.diagnosis.diagnosis import rejecting, symptoms
from flows.diagnosis.evidence import stage_views
from flows.diagnosis.findings import Finding
from infra.errors import SickRunError
from infra.tracking.history import StageHistory
from tasks.runner.run import StageResult


def say_nothing(label: str, text: str) -> None:
    """Ignore a warning."""


class RoundGate:
    """Accepts or rejects rounds, in order; `rejected` has the symptoms of rejected ones."""

    def __init__(
        self,
        thresholds: DiagnosisConfig,
        history: StageHistory,
        warn: Callable[[str, str], None] = say_nothing,
    ) -> None:
        self._thresholds, self._history, self._warn = thresholds, history, warn
        self._accepted: list[StageResult] = []
        self.rejected: dict[str, str] = {}

    def accepts(self, trained: StageResult, evaluated: StageResult) -> bool:
        """Return True if the next stages use the policy of a stage; a planned one is accepted.

        Raises:
            SickRunError: a symptom occurred for which the recipe ends the run.
        """
        results = [*self._accepted, trained, evaluated]
        shown = self._symptoms(results)
        found = {each.symptom: each for each in shown}
        for name in self._thresholds.end_run:
            if name in found:
                raise SickRunError(
                    f"{trained.label}: {name}: {found[name].text} "
                    f"({'; '.join(map(str, found[name].evidence))}); diagnosis.end_run names it: "
                    f"try {found[name].next[0]}, or take it out and run again"
                )
        whys = [f"{each.symptom}: {each.text}" for each in rejecting(shown, self._thresholds)]
        if whys:
            self._reject(trained.label, "; ".join(whys))
            return False
        self._accepted += [trained, evaluated]
        return True

    def _reject(self, label: str, why: str) -> None:
        self.rejected[label] = why
        taken = "the model that the run began with"
        if self._accepted:
            taken = f"the policy of {self._accepted[-2].label}"
        self._warn(label, f"rejected: {why}; what follows takes {taken}")

    def _symptoms(self, results: Sequence[StageResult]) -> list[Finding]:
        asked = self._thresholds.end_run or self._thresholds.reject_round
        if not asked or not all(each.artifact.digest for each in results):
            return []
        views = stage_views(self._history, [each.fingerprint for each in results])
        rounds = [view for view in views if isinstance(view.config, RLRoundStageConfig)]
        return symptoms(rounds, views, self._thresholds)
