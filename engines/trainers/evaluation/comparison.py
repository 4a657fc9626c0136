"""Two models on the same problems, metric by metric. No torch.

Promises: what is called better or worse lies beyond what chance gives at the stated confidence
(`engines.trainers.evaluation.paired`), for each metric by itself, and goes by which way the metric
is better; where nobody says, it is called higher or lower.
Does not promise anything of several metrics at once: of twenty, one may lie beyond by chance.
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
"""Metrics that are a mean over problems; of each a larger value is the better one."""
_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MetricGain:
    """One metric of two models.

    Attributes:
        metric: its name.
        value: of the model.
        other: of the one that it is compared with.
        gain: mean difference over the problems that have a value in both, above 0 where the model's
            value is the larger one.
        margin: what chance alone gives, at the stated confidence.
        num_problems: that were compared.
        higher_is_better: which way is better; None: nobody says.
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
        """In a word; `alike` where chance could have done it."""
        return verdict(self.gain, self.margin, self.higher_is_better)

    def __str__(self) -> str:
        return (
            f"{self.metric} {self.value:.4g} against {self.other:.4g}: {self.verdict} "
            f"({self.gain:+.4g}, chance {self.margin:.4g})"
        )


def compared_metrics(evaluation: Path, against: Path) -> list[str]:
    """Metrics that two evaluations both have a value of for each problem.

    Args:
        evaluation: directory of an evaluation.
        against: of the other.

    Returns:
        Their names, sorted.
    """
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
    """Compare one metric.

    Args:
        evaluation: directory of the model's evaluation.
        against: of the other's.
        metric: one of `compared_metrics`.
        confidence: two-sided, of the interval.
        seed: of the signs that are drawn.

    Returns:
        The gain; None where no problem has a value in both.

    Raises:
        ConfigError: the evaluations are of other problems.
    """
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
    """Which way is better; of a harness's metric only if both measurements say the same."""
    if not has_documents(evaluation):
        return True
    ours, theirs = (higher_is_better(each, metric) for each in (evaluation, against))
    return ours if ours == theirs else None


def comparison_metrics(gains: Sequence[MetricGain]) -> dict[str, float]:
    """What a stage says of a comparison, for `infra.tracking.comparison.verdicts`."""
    metrics = {f"{GAIN}{each.metric}": each.gain for each in gains}
    metrics |= {f"{MARGIN}{each.metric}": each.margin for each in gains}
    return metrics | {
        f"{HIGHER_IS_BETTER}{each.metric}": float(each.higher_is_better)
        for each in gains
        if each.higher_is_better is not None
    }


def comparison_json(gains: Sequence[MetricGain], confidence: float) -> dict[str, Any]:
    """What `comparison.json` says.

    Args:
        gains: by metric.
        confidence: of their margins.

    Returns:
        Plain values.
    """
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
    """What an evaluation found, by its directory."""
    return json.loads((evaluation / "summary.json").read_text(encoding="utf-8"))["metrics"]
