"""Tables of the report with the results of evaluations and comparisons.

Promises: the values are those of the stages' commit records. A run with one final evaluation and no
comparison has no such table.
"""

from collections.abc import Mapping

from flows.report.samples import BOUNDS, PREFIX, is_shown, shown_share
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


def measured_tables(stages: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return Markdown lines: pair accuracy, evaluations, harness tasks and comparisons."""
    evaluations = {each: found for each, found in stages.items() if each.startswith(EVALUATION)}
    comparisons = {each: found for each, found in stages.items() if each.startswith(COMPARISON)}
    harnesses = {each: found for each, found in stages.items() if each.startswith(HARNESS)}
    has_suites = any(label.startswith(OF_SUITE) for label in stages)
    shown = _pairs(stages)
    shown += _evaluations(evaluations) if evaluations and (has_suites or comparisons) else []
    shown += _harnesses(harnesses) if harnesses else []
    return [*shown, *(_comparisons(comparisons) if comparisons else [])]


def _pairs(stages: Mapping[str, Mapping[str, float]]) -> list[str]:
    found = {label: metrics for label, metrics in stages.items() if PAIR_ACCURACY in metrics}
    if not found:
        return []
    return [
        "| trained on pairs | held out | pair accuracy before | after | margin before | after |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {label} | {metrics.get(NUM_PAIRS, 0):.0f} | "
            f"{shown_share(metrics, BEFORE + PAIR_ACCURACY)} | "
            f"{shown_share(metrics, PAIR_ACCURACY)} | "
            f"{_number(metrics, BEFORE + PAIR_MARGIN)} | {_number(metrics, PAIR_MARGIN)} |"
            for label, metrics in found.items()
        ),
        "",
    ]


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else ""


def _evaluations(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = sorted(
        {name for metrics in found.values() for name in metrics if is_shown(name)}
        - {name for metrics in found.values() for name in metrics if name.startswith(PREFIX)}
    )
    return [
        f"| evaluation | problems | {' | '.join(names)} |",
        "|---|---:" + "|---:" * len(names) + "|",
        *(
            f"| {label} | {metrics.get('num_problems', 0):.0f} | "
            f"{' | '.join(shown_share(metrics, name) for name in names)} |"
            for label, metrics in found.items()
        ),
        "",
    ]


def _harnesses(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        "| harness | metric | value | interval |",
        "|---|---|---:|---|",
        *(
            f"| {label} | {name} | {value:.4g} | {_interval(metrics, name)} |"
            for label, metrics in found.items()
            for name, value in sorted(metrics.items())
            if "/" in name and not name.endswith(BOUNDS)
        ),
        "",
    ]


def _interval(metrics: Mapping[str, float], name: str) -> str:
    """Return the interval of a metric; empty if the harness has no standard error."""
    ends = [f"{metrics[name + bound]:.4g}" for bound in BOUNDS if name + bound in metrics]
    return f"[{', '.join(ends)}]" if ends else ""


def _comparisons(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        "| comparison | metric | gain | chance gives | |",
        "|---|---|---:|---:|---|",
        *(
            f"| {label} | {metric} | {metrics[GAIN + metric]:+.4f} | "
            f"{metrics[MARGIN + metric]:.4f} | {verdict} |"
            for label, metrics in found.items()
            for metric, verdict in verdicts(metrics).items()
        ),
        "",
    ]
