"""Renders a night as `night.md` with plots, and as an artifact on the Prefect run page.

Promises: nothing here changes a verdict; the page is on disk even if Prefect refuses it.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from flows.nightly.measurement import Measurement
from flows.nightly.night import Night, Outcome
from flows.nightly.plots import draw_curve, draw_ratios, ratios
from flows.report.page import MAX_PAGE_BYTES
from flows.report.report import data_uri
from infra.store.atomic import atomic_write_bytes

NIGHT_MD = "night.md"
MARKS = {"pass": "🟢 pass", "drift": "🟠 drift", "fail": "🔴 fail"}

_log = logging.getLogger(__name__)


def write_night(night: Night, stored: Mapping[str, Measurement | None], directory: Path) -> None:
    """Write the page and its plots; `stored` has the baseline of each recipe."""
    draw_ratios(night, stored, directory / "ratios.svg")
    for each in night.outcomes:
        name = each.verdict.recipe
        draw_curve(each, stored[name], directory / f"curve-{name}.svg")
    atomic_write_bytes(directory / NIGHT_MD, markdown(night, stored, directory).encode())


def show_night(night: Night, stored: Mapping[str, Measurement | None], directory: Path) -> None:
    """Publish the page of a written night on the Prefect run page."""
    page = markdown(night, stored, directory, embed=True)
    if len(page) > MAX_PAGE_BYTES:
        page = f"{markdown(night, stored, directory)}\nThe plots are in `{directory}`."
    try:
        create_markdown_artifact(markdown=page, key="nightly", description=night.name)
    except Exception as error:  # noqa: BLE001  the page is optional; it is on disk
        _log.warning("the night is not shown on the run page: %s", error)


def markdown(
    night: Night, stored: Mapping[str, Measurement | None], directory: Path, *, embed: bool = False
) -> str:
    """Return the page of a night; `embed` puts the plots into the text as data URIs."""
    words = [each.verdict.word for each in night.outcomes]
    counts = ", ".join(f"{words.count(word)} {mark}" for word, mark in MARKS.items())
    lines = [
        f"# Night {night.name}",
        "",
        counts,
        "",
        "| recipe | verdict | stage | accuracy | stored | speed | memory |",
        "|---|---|---|---:|---:|---:|---:|",
        *(_row(each, stored[each.verdict.recipe]) for each in night.outcomes),
        "",
    ]
    for each in night.outcomes:
        lines += _findings(each)
    for path in [directory / "ratios.svg", *sorted(directory.glob("curve-*.svg"))]:
        if path.exists():
            lines += [f"![{path.stem}]({data_uri(path) if embed else path.name})", ""]
    return "\n".join(lines)


def _row(outcome: Outcome, stored: Measurement | None) -> str:
    verdict = outcome.verdict
    shares = {
        name: f"{value:.2f}"
        for name, value in (ratios(outcome.measurement, stored) if stored else {}).items()
    }
    return (
        f"| {verdict.recipe} | {MARKS[verdict.word]} | {verdict.stage} "
        f"| {_accuracy(outcome.measurement)} | {_accuracy(stored)} "
        f"| {shares.get('speed', '')} | {shares.get('memory', '')} |"
    )


def _accuracy(measurement: Measurement | None) -> str:
    stages = measurement.runs[-1].stages.values() if measurement else ()
    values = [stage.accuracy for stage in stages if stage.accuracy is not None]
    return f"{values[-1]:.1%}" if values else ""


def _findings(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    if not (verdict.problems or verdict.drifted or verdict.notes):
        return
    yield f"**{verdict.recipe}**"
    yield ""
    yield from (f"- {problem}" for problem in verdict.problems)
    if verdict.drifted:
        yield f"- the first stage with another digest: `{verdict.drifted}`"
        yield from (f"- differs: {cause}" for cause in verdict.causes)
    yield from (f"- {note}" for note in verdict.notes)
    yield ""
