"""The diagnosis of a run: resources, then communication, then the algorithm.

In this order, because a cause in one shows as a symptom in the next: a replica that is lost makes
steps long, and weights that do not arrive make rewards fall.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.config.stages import EvaluateStageConfig, RLRoundStageConfig, SFTStageConfig
from flows.diagnosis.algorithm import loss_findings, poisoned_findings, round_findings
from flows.diagnosis.communication import time_findings
from flows.diagnosis.findings import Finding, StageView
from flows.diagnosis.resources import resource_findings
from flows.recipe.diagnosis import DiagnosisConfig

AREAS = ("resources", "communication", "algorithm")
_SEVERITIES = ("failed", "sick", "note")


@dataclass(frozen=True)
class Diagnosis:
    """What ails a run.

    Attributes:
        run: its name.
        stages: that were looked at, in order.
        findings: by area in the order of `AREAS`, the gravest first.
    """

    run: str
    stages: Sequence[StageView]
    findings: Sequence[Finding]

    @property
    def ills(self) -> list[Finding]:
        """What is more than a note."""
        return [finding for finding in self.findings if finding.severity != "note"]

    @property
    def verdict(self) -> str:
        """The run in one line."""
        names = list(dict.fromkeys(f"{f.symptom} ({f.stage})" for f in self.ills))
        return f"{self.run}: {', '.join(names)}" if names else f"{self.run}: nothing ails it"


def diagnose(run: str, stages: Sequence[StageView], thresholds: DiagnosisConfig) -> Diagnosis:
    """Look at a run, whether it ended or goes on.

    Args:
        run: its name.
        stages: in order.
        thresholds: of its recipe.

    Returns:
        The diagnosis.
    """
    found: list[Finding] = []
    for stage in stages:
        found += resource_findings(stage, thresholds)
        found += time_findings(stage, thresholds)
        found += poisoned_findings(stage)
        if isinstance(stage.config, SFTStageConfig):
            found += loss_findings(stage, thresholds)
    rounds = [stage for stage in stages if isinstance(stage.config, RLRoundStageConfig)]
    first: dict[str, Finding] = {}
    for number in range(1, len(rounds) + 1):
        for finding in symptoms(rounds[:number], stages, thresholds):
            first.setdefault(finding.symptom, finding)
    found += first.values()
    return Diagnosis(
        run,
        stages,
        sorted(found, key=lambda f: (AREAS.index(f.area), _SEVERITIES.index(f.severity))),
    )


def symptoms(
    rounds: Sequence[StageView], stages: Sequence[StageView], thresholds: DiagnosisConfig
) -> list[Finding]:
    """What the last of some rounds shows, with the rounds before and their evaluations.

    Args:
        rounds: in order.
        stages: all of the run, among which their evaluations are.
        thresholds: of the recipe.

    Returns:
        What was found.
    """
    known = {"sft", *(each.label for each in rounds)}
    evaluations = {
        stage.config.of: stage
        for stage in stages
        if isinstance(stage.config, EvaluateStageConfig) and stage.config.of in known
    }
    return round_findings(rounds, evaluations, thresholds)
