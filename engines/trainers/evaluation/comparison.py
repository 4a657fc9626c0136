"""Compare two models on the same problems, metric by metric; imports no torch.

Promises: a metric called better or worse differs beyond chance at the stated confidence
(`engines.trainers.evaluation.paired`); without a known direction it is called higher or lower.
Does not promise a joint confidence: of twenty metrics one may differ by chance.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.trainers.evaluation.documents import has_documents, higher_is_better, is_mean
from engines.trainers.evaluation.paired import differences_of, paired_gain
from infra.tracking.comparison import GAIN, HIGHER_IS_BETTER, MARGIN, Verdict, verdict

_OF_PROBLEMS = re.compile(r"accuracy|reward/mean|(pass|maj|avg)@[1-9][0-9]*")
"""Metrics that are means over problems; for all of them higher is better."""
_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MetricGain:
    """One metric of a model (`value`) and of another (`other`).

    `gain` is the mean difference over the problems with a value in both, `margin` the one that
    chance gives. `higher_is_better` is None if the direction is unknown.
    """

    metric: str
    value: float
    other: float
    gain: float
    margin: float
    num_problems: int
    higher_is_better: bool | None

    @property
    def verdict(self) -> Verdict:
        """The verdict in a word; `alike` if chance explains the gain."""
        return verdict(self.gain, self.margin, self.higher_is_better)

    def __str__(self) -> str:
        return (
            f"{self.metric} {self.value:.4g} against {self.other:.4g}: {self.verdict} "
            f"({self.gain:+.4g}, chance {self.margin:.4g})"
        )


def compared_metrics(evaluation: Path, against: Path) -> list[str]:
    """Return the sorted metrics that have a value for each problem in both evaluations."""
    ours, theirs = metrics_of(evaluation), metrics_of(against)
    names = sorted(ours.keys() & theirs.keys())
    if not has_documents(evaluation):
        return list(filter(_OF_PROBLEMS.fullmatch, names))
    return [
        name
        for name in names
        if is_mean(evaluation, name, ours[name]) and is_mean(against, name, theirs[name])
    ]


def metric_gain(
    evaluation: Path, against: Path, metric: str, confidence: float, seed: int
) -> MetricGain | None:
    """Compare one metric; None if no problem has both values, `ConfigError` if problems differ."""
    differences = differences_of(evaluation, against, metric)
    if not differences:
        return None
    gain = paired_gain(differences, confidence, seed)
    value, other = (metrics_of(each)[metric] for each in (evaluation, against))
    return MetricGain(
        metric,
        value,
        other,
        gain.mean,
        gain.margin,
        gain.num_problems,
        _direction(evaluation, against, metric),
    )


def _direction(evaluation: Path, against: Path, metric: str) -> bool | None:
    """Return the direction of a metric; None if two harness measurements disagree."""
    if not has_documents(evaluation):
        return True
    ours, theirs = (higher_is_better(each, metric) for each in (evaluation, against))
    return ours if ours == theirs else None


def comparison_metrics(gains: Sequence[MetricGain]) -> dict[str, float]:
    """Return a stage's metrics of a comparison, for `infra.tracking.comparison.verdicts`."""
    metrics = {f"{GAIN}{each.metric}": each.gain for each in gains}
    metrics |= {f"{MARGIN}{each.metric}": each.margin for each in gains}
    return metrics | {
        f"{HIGHER_IS_BETTER}{each.metric}": float(each.higher_is_better)
        for each in gains
        if each.higher_is_better is not None
    }


def comparison_json(gains: Sequence[MetricGain], confidence: float) -> dict[str, Any]:
    """Return the content of `comparison.json`."""
    found = {
        each.metric: {
            "value": each.value,
            "against": each.other,
            "gain": each.gain,
            "margin": each.margin,
            "num_problems": each.num_problems,
            "higher_is_better": each.higher_is_better,
            "verdict": each.verdict,
        }
        for each in gains
    }
    return {"schema": _SCHEMA_VERSION, "confidence": confidence, "metrics": found}


def metrics_of(evaluation: Path) -> dict[str, float]:
    """Return the metrics of an evaluation's directory."""
    return json.loads((evaluation / "summary.json").read_text(encoding="utf-8"))["metrics"]
