"""`pytest tests/faults --figures`: what the faults came to, and a verdict as the last line."""

import pytest
from figures import FIGURES


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--figures", action="store_true", help="print the figures and a verdict")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Behind pytest's own summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption("figures", False):
        return
    parts: dict[str, list[float]] = {name: [] for name in FIGURES}
    for report in reporter.getreports("passed"):
        if report.when == "call":
            for name, number in report.user_properties:
                if name in parts:
                    parts[name].append(number)
    totals = {name: figure.total(parts[name]) for name, figure in FIGURES.items()}
    for name, figure in FIGURES.items():
        reporter.write_line(figure.line(name, totals[name]))
    counts = {
        outcome: len(reporter.getreports(outcome)) for outcome in ("failed", "error", "skipped")
    }
    told = [f"{number} {outcome}" for outcome, number in counts.items() if number]
    told += [f"not {name}" for name, figure in FIGURES.items() if not figure.holds(totals[name])]
    reporter.write_line(f"verdict: {'not held, ' + ', '.join(told) if told else 'held'}")
