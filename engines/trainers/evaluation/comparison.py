"""Compare two models on the same problems, metric by metric; imports no torch.

Paired randomization test (Fisher, The Design of Experiments, 1935, sec. 21; Noreen, Computer
Intensive Methods for Testing Hypotheses, 1989): the sum of the problems' differences is compared
with sums under random signs. For verdicts, whose differences are -1, 0 and 1, it is the exact
McNemar (sign) test up to the error of its draws. Rows of one problem share one sign.

Promises: equal models are called better with probability at most (1 - confidence) / 2, and worse
likewise. Without a known direction the verdict is higher or lower.
Does not promise: a joint confidence (of twenty metrics one may differ by chance), or an interval
for the size of a large gain: the margin is then wider than that of a bootstrap.
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from engines.trainers.evaluation.accuracy import SampledAnswer, sampled_values, sums_by_problem
from engines.trainers.evaluation.documents import (
    document_values,
    has_documents,
    higher_is_better,
    is_mean,
)
from infra.errors import ConfigError
from infra.tracking.comparison import GAIN, HIGHER_IS_BETTER, MARGIN, Verdict, verdict

NUM_DRAWS = 20_000
MAX_CELLS = 2**22
"""Bound on draws x distinct sizes that are computed at once."""


@dataclass(frozen=True)
class PairedGain:
    """A mean difference of a metric, above 0 if the candidate has the larger values.

    `margin` is half the width of its interval, `num_problems` counts distinct problems.
    """

    mean: float
    margin: float
    num_problems: int


def paired_gain(
    differences: Sequence[float], confidence: float, seed: int, num_draws: int = NUM_DRAWS
) -> PairedGain:
    """Compare the mean of differences, one per distinct problem, with means over random signs."""
    if not differences:
        raise ValueError("got no differences; need one or more")
    values = np.asarray(differences, dtype=np.float64)
    sizes, which = np.unique(np.abs(values), return_inverse=True)
    counts = np.bincount(which)
    # The observed sum is computed like the drawn ones, so that equal signs give equal bits.
    observed = np.bincount(which, np.sign(values)) @ sizes
    random = np.random.default_rng(seed)
    num_rows = max(1, MAX_CELLS // len(sizes))
    sums = [
        (2 * random.binomial(counts, 0.5, (min(num_rows, num_draws - start), len(sizes))) - counts)
        @ sizes
        for start in range(0, num_draws, num_rows)
    ]
    # The margin is one of the sums, as differences of verdicts come in steps of one problem.
    margin = np.quantile(np.concatenate(sums), (1 + confidence) / 2, method="inverted_cdf")
    return PairedGain(float(observed) / len(values), float(margin) / len(values), len(values))


def differences_of(evaluation: Path, incumbent: Path, metric: str) -> list[float]:
    """Return each distinct problem's gain over the incumbent; empty if no row has both values.

    Gains are over rows with both values, as `ProblemSums.weighted_means`. Raises `ConfigError` if
    the problems of the two evaluations differ.
    """
    now, before = _rows(evaluation, metric), _rows(incumbent, metric)
    differing = sorted(now.keys() ^ before.keys())
    if differing:
        index, source, _ = differing[0]
        raise ConfigError(
            "inputs.incumbent_evaluation",
            f"got other problems than those of the candidate ({len(differing)} differ, the first "
            f"is problem {index} of {source}); need the same; evaluate both on one dataset",
        )
    pairs = [(problem, new, before[row][1]) for row, (problem, new) in now.items()]
    differences = [
        (problem, new - old) for problem, new, old in pairs if new is not None and old is not None
    ]
    return sums_by_problem(differences).weighted_means if differences else []


RowKey = tuple[int, str, str]
"""Index in the evaluation split, data source, and true answer or digest of a harness's document."""


def _rows(directory: Path, metric: str) -> Mapping[RowKey, tuple[Hashable, float | None]]:
    """Return the identity of each row's problem, and the row's contribution to a metric."""
    if has_documents(directory):
        return {key: (key[1:], v) for key, v in document_values(directory, metric).items()}
    columns = ["index", "data_source", "prompt", "ground_truth", "images", "greedy", "samples"]
    path = directory / "rows.parquet"
    stored = pq.read_schema(path).names
    rows = pq.read_table(path, columns=[each for each in columns if each in stored]).to_pylist()
    return {
        (row["index"], row["data_source"], row["ground_truth"]): (
            # Older evaluations have no column of image digests.
            (row["prompt"], row["ground_truth"], tuple(row.get("images") or ())),
            problem_value(row, metric),
        )
        for row in rows
    }


def problem_value(row: Mapping[str, Any], metric: str) -> float | None:
    """Return a row's contribution to a metric of `rows.parquet`; None if it makes none."""
    if "@" not in metric:
        return row["greedy"]["correct" if metric == "accuracy" else "score"]
    # Older evaluations have no `answer`, and no maj@k.
    samples = [
        SampledAnswer(each.get("answer"), each["correct"], each["score"])
        for each in row["samples"]
        if each["correct"] is not None
    ]
    return sampled_values(samples, int(metric.partition("@")[2])).get(metric)


_OF_PROBLEMS = re.compile(r"accuracy|reward/mean|(pass|maj|avg)@[1-9][0-9]*")
"""Metrics that are means over problems; for all of them higher is better."""
_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MetricGain:
    """One metric of a model (`value`) and of another (`other`).

    `gain` is the mean difference over the problems with a value in both, `margin` the largest that
    chance explains. `higher_is_better` is None if the direction is unknown.
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
    """Return the names, sorted, of metrics that are means over problems in both evaluations."""
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
    direction: bool | None = True
    if has_documents(evaluation):
        # Two measurements of the harness may disagree.
        ours, theirs = (higher_is_better(each, metric) for each in (evaluation, against))
        direction = ours if ours == theirs else None
    return MetricGain(metric, value, other, gain.mean, gain.margin, gain.num_problems, direction)


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
    return {
        "schema": _SCHEMA_VERSION,
        "confidence": confidence,
        "metrics": {
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
        },
    }


def metrics_of(evaluation: Path) -> dict[str, float]:
    """Return the metrics of an evaluation's directory."""
    return json.loads((evaluation / "summary.json").read_text(encoding="utf-8"))["metrics"]
