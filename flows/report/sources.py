"""The metrics of an evaluation by data source, as a table of the report.

Promises: only what the stage's commit record says; a stage without sources has no table.
"""

from collections import defaultdict
from collections.abc import Mapping

PREFIX = "source/"
"""Pattern of `source/<name>/<metric>`; the name may contain a `/`, the metric must not."""
BOUNDS = ("_low", "_high")
"""Behind the name of a metric: the ends of its interval."""


def source_table(stage: str, metrics: Mapping[str, float]) -> list[str]:
    """A table with one row for each data source.

    Args:
        stage: label of the evaluation.

    Returns:
        Lines of Markdown; none without sources.
    """
    sources: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, value in metrics.items():
        if key.startswith(PREFIX):
            source, _, name = key.removeprefix(PREFIX).rpartition("/")
            sources[source][name] = value
    if not sources:
        return []
    names = [
        name
        for name in sorted({name for found in sources.values() for name in found})
        if is_shown(name)
    ]
    return [
        f"`{stage}` by data source:",
        "",
        f"| data source | problems | {' | '.join(names)} |",
        "|---|---:" + "|---:" * len(names) + "|",
        *(
            f"| {source.replace('|', '&#124;')} | {found.get('num_problems', 0):.0f} | "
            f"{' | '.join(shown_share(found, name) for name in names)} |"
            for source, found in sorted(sources.items())
        ),
        "",
    ]


def is_shown(metric: str) -> bool:
    """True if a metric has a column of its own: the accuracy, and those at k."""
    return metric == "accuracy" or ("@" in metric and not metric.endswith(BOUNDS))


def shown_share(found: Mapping[str, float], name: str) -> str:
    """A value and its interval: a share in percent, the best of k scores as it is.

    Args:
        found: metrics of an evaluation.
        name: one of them, or of others.

    Returns:
        For a cell of a table; empty where there is no such metric.
    """
    if name not in found:
        return ""
    values = [found[name], *(found[name + bound] for bound in BOUNDS if name + bound in found)]
    shown = [f"{value:.3g}" if name.startswith("best@") else f"{value:.1%}" for value in values]
    return f"{shown[0]} [{', '.join(shown[1:])}]" if len(shown) > 1 else shown[0]
