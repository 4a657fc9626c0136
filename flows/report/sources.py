"""The metrics of an evaluation by data source, as a table of the report."""

from collections import defaultdict
from collections.abc import Mapping

PREFIX = "source/"
"""Metrics are `source/<name>/<metric>`; the name may contain a `/`, the metric must not."""
BOUNDS = ("_low", "_high")
"""Suffixes of a metric for the ends of its interval."""


def source_table(stage: str, metrics: Mapping[str, float]) -> list[str]:
    """Return Markdown lines with a row for each data source; empty if there are none."""
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
    """True if a metric has a column: the accuracy, and metrics at k."""
    return metric == "accuracy" or ("@" in metric and not metric.endswith(BOUNDS))


def shown_share(found: Mapping[str, float], name: str) -> str:
    """Return a value with its interval as a table cell; empty if the metric is missing.

    Shares are in percent, best-of-k scores as they are.
    """
    if name not in found:
        return ""
    values = [found[name], *(found[name + bound] for bound in BOUNDS if name + bound in found)]
    shown = [f"{value:.3g}" if name.startswith("best@") else f"{value:.1%}" for value in values]
    return f"{shown[0]} [{', '.join(shown[1:])}]" if len(shown) > 1 else shown[0]
