"""Tables of the report with the results of evaluations and comparisons.

Promises: the values are those of the stages' commit records. A run with one final evaluation and no
comparison has no table of evaluations.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from infra.tracking.comparison import (
    BEFORE,
    GAIN,
    MARGIN,
    NUM_PAIRS,
    PAIR_ACCURACY,
    PAIR_MARGIN,
    verdicts,
)

EVALUATION, COMPARISON, HARNESS, OF_SUITE = "evaluate", "compare", "harness_", "preprocess_"
"""Label prefixes of these stages; the last one makes the dataset of a suite."""
PREFIX = "source/"
"""Metrics are `source/<name>/<metric>`; the name may contain a `/`, the metric must not."""
BOUNDS = ("_low", "_high")
"""Suffixes of a metric for the ends of its interval."""

Stages = Mapping[str, Mapping[str, float]]
"""Metrics by stage label."""


def measured_tables(stages: Stages) -> list[str]:
    """Return Markdown lines: pair accuracy, evaluations, harness tasks and comparisons."""
    evaluations = {each: found for each, found in stages.items() if each.startswith(EVALUATION)}
    comparisons = {each: found for each, found in stages.items() if each.startswith(COMPARISON)}
    has_suites = any(label.startswith(OF_SUITE) for label in stages)
    return [
        *_table(
            "| trained on pairs | held out "
            "| pair accuracy before | after | margin before | after |",
            "|---|---:|---:|---:|---:|---:|",
            (
                (
                    label,
                    f"{metrics.get(NUM_PAIRS, 0):.0f}",
                    _share(metrics, BEFORE + PAIR_ACCURACY),
                    _share(metrics, PAIR_ACCURACY),
                    _number(metrics, BEFORE + PAIR_MARGIN),
                    _number(metrics, PAIR_MARGIN),
                )
                for label, metrics in stages.items()
                if PAIR_ACCURACY in metrics
            ),
        ),
        *(_shares("evaluation", evaluations) if has_suites or comparisons else []),
        *_table(
            "| harness | metric | value | interval |",
            "|---|---|---:|---|",
            (
                (label, name, f"{value:.4g}", _interval(metrics, name))
                for label, metrics in stages.items()
                if label.startswith(HARNESS)
                for name, value in sorted(metrics.items())
                if "/" in name and not name.endswith(BOUNDS)
            ),
        ),
        *_table(
            "| comparison | metric | gain | chance gives | |",
            "|---|---|---:|---:|---|",
            (
                (
                    label,
                    metric,
                    f"{metrics[GAIN + metric]:+.4f}",
                    f"{metrics[MARGIN + metric]:.4f}",
                    verdict,
                )
                for label, metrics in comparisons.items()
                for metric, verdict in verdicts(metrics).items()
            ),
        ),
    ]


def source_table(stage: str, metrics: Mapping[str, float]) -> list[str]:
    """Return Markdown lines with a row for each data source; empty if there are none."""
    sources: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, value in metrics.items():
        if key.startswith(PREFIX):
            source, _, name = key.removeprefix(PREFIX).rpartition("/")
            sources[source][name] = value
    lines = _shares("data source", dict(sorted(sources.items())))
    return [f"`{stage}` by data source:", "", *lines] if lines else []


def _shares(what: str, found: Stages) -> list[str]:
    """Return a table with a row for each entry of `found` and a column for each shown metric.

    These are the accuracy, and metrics at k.
    """
    names = sorted(
        {
            name
            for metrics in found.values()
            for name in metrics
            if name == "accuracy"
            or ("@" in name and not name.endswith(BOUNDS) and not name.startswith(PREFIX))
        }
    )
    rows = (
        (
            label.replace("|", "&#124;"),
            f"{metrics.get('num_problems', 0):.0f}",
            *(_share(metrics, name) for name in names),
        )
        for label, metrics in found.items()
    )
    title = f"| {what} | problems | {' | '.join(names)} |"
    return _table(title, "|---|---:" + "|---:" * len(names) + "|", rows)


def _table(title: str, align: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return Markdown lines; empty without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [title, align, *lines, ""] if lines else []


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else ""


def _interval(metrics: Mapping[str, float], name: str) -> str:
    """Return the interval of a metric; empty if the harness has no standard error."""
    ends = [f"{metrics[name + bound]:.4g}" for bound in BOUNDS if name + bound in metrics]
    return f"[{', '.join(ends)}]" if ends else ""


def _share(found: Mapping[str, float], name: str) -> str:
    """Return a value with its interval as a table cell; empty if the metric is missing.

    Shares are in percent, best-of-k scores as they are.
    """
    if name not in found:
        return ""
    values = [found[name], *(found[name + bound] for bound in BOUNDS if name + bound in found)]
    shown = [f"{value:.3g}" if name.startswith("best@") else f"{value:.1%}" for value in values]
    return f"{shown[0]} [{', '.join(shown[1:])}]" if len(shown) > 1 else shown[0]
