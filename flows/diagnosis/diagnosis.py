"""The diagnosis of a run: resources, then communication, then the algorithm.

The order follows causes: a lost replica makes steps slow, and weights that do not arrive make
rewards fall.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engines.config.recipe import DiagnosisConfig
from engines.config.stages.final import EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.diagnosis.findings import Finding, StageView
from flows.diagnosis.rules import (
    loss_findings,
    poisoned_findings,
    resource_findings,
    round_findings,
    time_findings,
)

AREAS = ("resources", "communication", "algorithm")
_SEVERITIES = ("failed", "sick", "note")


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a run, sorted by area in the order of `AREAS`, then by severity."""

    run: str
    stages: Sequence[StageView]
    findings: Sequence[Finding]

    @property
    def ills(self) -> list[Finding]:
        """Findings more severe than a note."""
        return [finding for finding in self.findings if finding.severity != "note"]

    @property
    def verdict(self) -> str:
        """Summary of the run in one line."""
        places: dict[str, dict[str, None]] = {}
        for finding in self.ills:
            places.setdefault(finding.symptom, {})[finding.place] = None
        names = [f"{symptom} ({', '.join(found)})" for symptom, found in places.items()]
        return f"{self.run}: {', '.join(names) or 'no findings'}"


def diagnose(run: str, stages: Sequence[StageView], thresholds: DiagnosisConfig) -> Diagnosis:
    """Diagnose a run, finished or not; `stages` are in order."""
    found: list[Finding] = []
    for stage in stages:
        found += resource_findings(stage, thresholds)
        found += time_findings(stage, thresholds)
        found += poisoned_findings(stage)
        if isinstance(stage.config, SFTStageConfig):
            found += loss_findings(stage, thresholds)
    found += _of_rounds(stages, thresholds)
    return Diagnosis(
        run,
        stages,
        sorted(found, key=lambda f: (AREAS.index(f.area), _SEVERITIES.index(f.severity))),
    )


def _of_rounds(stages: Sequence[StageView], thresholds: DiagnosisConfig) -> list[Finding]:
    """Return the findings of each round, compared only with accepted earlier rounds."""
    found: list[Finding] = []
    accepted: list[StageView] = []
    evaluations = _evaluations(stages)
    for view in stages:
        if not isinstance(view.config, RLRoundStageConfig) or not view.steps:
            continue
        shown = symptoms([*accepted, view], stages, thresholds)
        scored = evaluations.get(view.label)
        is_judged = view.is_committed and scored is not None and scored.is_committed
        is_rejected = is_judged and bool(rejecting(shown, thresholds))
        found += [replace(finding, rejected=is_rejected) for finding in shown]
        if not is_rejected:
            accepted.append(view)
    return found


def rejecting(found: Sequence[Finding], thresholds: DiagnosisConfig) -> list[Finding]:
    """Return the findings that reject a round, in the order in which the recipe names them."""
    shown = {finding.symptom: finding for finding in found}
    return [shown[name] for name in thresholds.reject_round if name in shown]


def symptoms(
    rounds: Sequence[StageView], stages: Sequence[StageView], thresholds: DiagnosisConfig
) -> list[Finding]:
    """Return the findings of the last of `rounds`; their evaluations are among `stages`."""
    known = {"sft", *(each.label for each in rounds)}
    evaluations = {
        of: stage
        for of, stage in _evaluations(stages).items()
        if of in known or re.fullmatch(r"preference(_\d+)?", of)
    }
    return round_findings(rounds, evaluations, thresholds)


def _evaluations(stages: Sequence[StageView]) -> Mapping[str, StageView]:
    return {
        stage.config.of: stage for stage in stages if isinstance(stage.config, EvaluateStageConfig)
    }
