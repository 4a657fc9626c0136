"""Test whether one model beats another on the same problems beyond chance; imports no torch.

Paired randomization test (Fisher, The Design of Experiments, 1935, sec. 21; Noreen, Computer
Intensive Methods for Testing Hypotheses, 1989): the sum of each problem's differences is compared
with sums over random signs. For verdicts, whose differences are -1, 0 and 1, it is the exact
McNemar (sign) test up to the error of its draws. Rows of one problem share one sign.
Promises: equal models are told apart with probability at most (1 - confidence) / 2.
Does not promise: an interval for the size of a large gain; it is wider than that of a bootstrap.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from engines.trainers.evaluation.documents import document_values, has_documents
from engines.trainers.evaluation.repeated import sums_by_problem
from engines.trainers.evaluation.sampled import SampledAnswer, sampled_values
from infra.errors import ConfigError

NUM_DRAWS = 20_000
MAX_CELLS = 2**22
"""Signs that are drawn at once."""


@dataclass(frozen=True)
class PairedGain:
    """A mean difference, above 0 if the second model is better.

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
    """Return by how much each distinct problem went better than with the incumbent; may be empty.

    Each is the mean over the rows with a value in both, weighted so that the mean of all is that
    over rows. Raises `ConfigError` if the problems of the two evaluations differ.
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
    pairs = [(new, before[row].value) for row, new in now.items()]
    differences = [
        (new.problem, new.value - old)
        for new, old in pairs
        if new.value is not None and old is not None
    ]
    return sums_by_problem(differences).weighted_means if differences else []


RowKey = tuple[int, str, str]
"""Index in the evaluation split, data source, and true answer or digest of a harness's document."""


@dataclass(frozen=True)
class _Row:
    """The identity of a row's problem, and the row's contribution to a metric."""

    problem: Hashable
    value: float | None


def _rows(directory: Path, metric: str) -> Mapping[RowKey, _Row]:
    if has_documents(directory):
        values = document_values(directory, metric)
        return {key: _Row(key[1:], value) for key, value in values.items()}
    columns = ["index", "data_source", "prompt", "ground_truth", "images", "greedy", "samples"]
    path = directory / "rows.parquet"
    stored = pq.read_schema(path).names
    rows = pq.read_table(path, columns=[each for each in columns if each in stored]).to_pylist()
    return {
        (row["index"], row["data_source"], row["ground_truth"]): _Row(
            # Older evaluations have no column of image digests.
            (row["prompt"], row["ground_truth"], tuple(row.get("images") or ())),
            problem_value(row, metric),
        )
        for row in rows
    }


def problem_value(row: Mapping[str, Any], metric: str) -> float | None:
    """Return a row's contribution to a metric of `rows.parquet`; None if it is unscored."""
    if "@" not in metric:
        return row["greedy"]["correct" if metric == "accuracy" else "score"]
    # Older evaluations have no `answer`, and no maj@k.
    samples = [
        SampledAnswer(each.get("answer"), each["correct"], each["score"])
        for each in row["samples"]
        if each["correct"] is not None
    ]
    return sampled_values(samples, int(metric.partition("@")[2])).get(metric)
