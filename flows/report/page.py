"""Shows the report on the Prefect run page; an error here cannot fail a finished run."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.diagnosis.page import DIAGNOSIS_MD
from flows.report.report import Report, markdown
from flows.report.samples import PAGE_NAME, samples_markdown
from tasks.runner.run import headline_metric

MAX_PAGE_BYTES = 1_000_000

_log = logging.getLogger(__name__)


def show_report(report: Report, directory: Path) -> None:
    """Create the artifacts of a finished run."""
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
    show(create_table_artifact, f"stages-{key}", report.run, table=rows)
    show_page(f"report-{key}", report.run, partial(markdown, report, directory), directory)
    page = directory / PAGE_NAME
    if page.exists():
        samples = samples_markdown(page.read_text("utf-8"), page)
        show(create_markdown_artifact, f"samples-{key}", f"{report.run}: samples", markdown=samples)
    show_diagnosis(report.recipe, report.run, directory)


def show_diagnosis(recipe: str, run: str, directory: Path) -> None:
    """Create the artifact of a run's diagnosis, if its directory has one with findings."""
    path = directory / DIAGNOSIS_MD
    if path.exists():
        text = path.read_text("utf-8")[:MAX_PAGE_BYTES]
        key = f"diagnosis-{_key(recipe)}"
        show(create_markdown_artifact, key, f"{run}: diagnosis", markdown=text)


def show_page(key: str, description: str, render: Callable[..., str], directory: Path) -> None:
    """Create an artifact of Markdown; `render(embed=True)` embeds the plots of `directory`."""
    page = render(embed=True)
    if len(page) > MAX_PAGE_BYTES:
        page = f"{render()}\nThe plots are in `{directory}`."
    show(create_markdown_artifact, key, description, markdown=page)


def show(create: Callable[..., Any], key: str, description: str, **content: Any) -> None:
    """Create an artifact; an error is only a warning, because everything is on disk, too."""
    try:
        create(key=key, description=description, **content)
    except Exception as error:  # noqa: BLE001  the run page is optional
        _log.warning("%s is not shown on the run page: %s", description, error)


def _key(recipe: str) -> str:
    return recipe.replace(".", "-").replace("_", "-")
