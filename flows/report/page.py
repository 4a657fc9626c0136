"""Shows the report on the Prefect run page; an error of Prefect cannot fail a finished run."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.diagnosis.diagnosis import DIAGNOSIS_MD
from flows.report.report import Report, markdown
from flows.report.samples import PAGE_NAME, samples_markdown
from tasks.runner.run import headline_metric

MAX_PAGE_BYTES = 1_000_000

_log = logging.getLogger(__name__)


def show_report(report: Report, directory: Path) -> None:
    """Create the Prefect artifacts of a finished run: stages, report, samples and diagnosis."""
    key = _key(report.recipe)
    rows = [
        {
            "stage": stage.name,
            "": stage.state,
            "seconds": round(stage.seconds, 1),
            "digest": stage.digest[:12],
            "fingerprint": stage.fingerprint[:12],
            "metric": headline_metric(stage.metrics),
        }
        for stage in report.stages
    ]
    with _optional(f"{report.run}: report"):
        create_table_artifact(table=rows, key=f"stages-{key}", description=report.run)
        _page(f"report-{key}", report.run, partial(markdown, report, directory), directory)
        page = directory / PAGE_NAME
        if page.exists():
            samples = samples_markdown(page.read_text("utf-8"), page)
            create_markdown_artifact(samples, f"samples-{key}", f"{report.run}: samples")
    show_diagnosis(report.recipe, report.run, directory)


def show_diagnosis(recipe: str, run: str, directory: Path) -> None:
    """Create the artifact of a run's diagnosis, if its directory has `diagnosis.md`."""
    path = directory / DIAGNOSIS_MD
    with _optional(f"{run}: diagnosis"):
        if path.exists():
            text = path.read_text("utf-8")[:MAX_PAGE_BYTES]
            create_markdown_artifact(text, f"diagnosis-{_key(recipe)}", f"{run}: diagnosis")


def show_page(key: str, description: str, render: Callable[..., str], directory: Path) -> None:
    """Create an artifact of Markdown; `render(embed=True)` embeds the plots of `directory`."""
    with _optional(description):
        _page(key, description, render, directory)


@contextmanager
def _optional(what: str) -> Iterator[None]:
    """Scope that logs an error as a warning, because everything is also on disk."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the run page is optional
        _log.warning("%s is not shown on the run page: %s", what, error)


def _page(key: str, description: str, render: Callable[..., str], directory: Path) -> None:
    page = render(embed=True)
    if len(page) > MAX_PAGE_BYTES:
        page = f"{render()}\nThe plots are in `{directory}`."
    create_markdown_artifact(page, key, description)


def _key(recipe: str) -> str:
    return recipe.replace(".", "-").replace("_", "-")
