"""Shows the report on the Prefect run page; an error here cannot fail a finished run."""

import logging
from pathlib import Path

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
    page = markdown(report, directory, embed=True)
    if len(page) > MAX_PAGE_BYTES:
        page = f"{markdown(report, directory)}\nThe plots are in `{directory}`."
    samples = directory / PAGE_NAME
    try:
        create_table_artifact(table=rows, key=f"stages-{key}", description=report.run)
        create_markdown_artifact(markdown=page, key=f"report-{key}", description=report.run)
        if samples.exists():
            create_markdown_artifact(
                markdown=samples_markdown(samples.read_text("utf-8"), samples),
                key=f"samples-{key}",
                description=f"{report.run}: samples",
            )
    except Exception as error:  # noqa: BLE001  the page is optional; the report is on disk
        _log.warning("the report is not shown on the run page: %s", error)
    show_diagnosis(report.recipe, report.run, directory)


def show_diagnosis(recipe: str, run: str, directory: Path) -> None:
    """Create the artifact of a run's diagnosis, if its directory has one with findings."""
    path = directory / DIAGNOSIS_MD
    try:
        if path.exists():
            create_markdown_artifact(
                markdown=path.read_text("utf-8")[:MAX_PAGE_BYTES],
                key=f"diagnosis-{_key(recipe)}",
                description=f"{run}: diagnosis",
            )
    except Exception as error:  # noqa: BLE001  the same
        _log.warning("the diagnosis is not shown on the run page: %s", error)


def _key(recipe: str) -> str:
    return recipe.replace(".", "-").replace("_", "-")
