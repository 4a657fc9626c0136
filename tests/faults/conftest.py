"""`pytest tests/faults --figures`: what the faults came to, and a verdict as the last line.

A test gives its part of a figure with `record_property("F1", number)`; parts are added up.
"""

from collections import Counter

import pytest

FIGURES = {
    "F1": (100, "kills at storage calls, after each of which a fresh process ends identically"),
    "F7": (1200, "damaged step checkpoints, each refused with file and digests"),
}
"""How many there have to be, and of what."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--figures", action="store_true", help="print the figures and a verdict")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Behind pytest's own summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption("figures", False):
        return
    found: Counter[str] = Counter()
    for report in reporter.getreports("passed"):
        if report.when == "call":
            found.update({name: n for name, n in report.user_properties if name in FIGURES})
    for name, (need, what) in FIGURES.items():
        reporter.write_line(f"{name}  {found[name]} (need {need}) {what}")
    counts = {
        outcome: len(reporter.getreports(outcome)) for outcome in ("failed", "error", "skipped")
    }
    short = [name for name, (need, _) in FIGURES.items() if found[name] < need]
    told = [f"{number} {outcome}" for outcome, number in counts.items() if number]
    told += [f"{name} is short" for name in short]
    reporter.write_line(f"verdict: {'not held, ' + ', '.join(told) if told else 'held'}")
