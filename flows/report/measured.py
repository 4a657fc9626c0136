"""What a run measured, side by side, as tables of the report.

Promises: only what the stages' commit records say. A run with one final evaluation, and nothing
that it is compared with, has no such table.
"""

from collections.abc import Mapping

from flows.report.sources import PREFIX, is_shown, shown_share
from infra.tracking.comparison import GAIN, MARGIN, verdicts

EVALUATION, COMPARISON, OF_SUITE = "evaluate", "compare", "preprocess_"
"""How the labels of these stages begin; the last makes the dataset of a suite."""


def measured_tables(stages: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Evaluations with their intervals, and what came of comparing two models.

    Args:
        stages: metrics by label, of a run.

    Returns:
        Lines of Markdown.
    """
    evaluations = {each: found for each, found in stages.items() if each.startswith(EVALUATION)}
    comparisons = {each: found for each, found in stages.items() if each.startswith(COMPARISON)}
    has_suites = any(label.startswith(OF_SUITE) for label in stages)
    shown = _evaluations(evaluations) if has_suites or comparisons else []
    return [*shown, *(_comparisons(comparisons) if comparisons else [])]


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
