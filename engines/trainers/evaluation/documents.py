"""The files of a measurement by a harness: `summary.json`, and `documents.parquet`. No torch.

Promises: equal measurements give equal bytes, for one version of pyarrow. What each document
contributes to a metric is there as a number where the harness has one; the metrics that are the
mean of those can be compared between two models document by document.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isclose
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENTS_NAME = "documents.parquet"
SUMMARY_NAME = "summary.json"
SCHEMA_VERSION = 1
NO_FILTER = "none"
"""What the harness calls answers as they are."""

_SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("filter", pa.string()),
        ("index", pa.int64()),
        ("digest", pa.string()),
        ("document", pa.string()),
        ("target", pa.string()),
        ("requests", pa.list_(pa.string())),
        ("responses", pa.list_(pa.string())),
        ("metrics", pa.map_(pa.string(), pa.float64())),
    ]
)


@dataclass(frozen=True)
class Document:
    """One document of a task, as one filter read its answers.

    Attributes:
        task: its name.
        filter: what took the answer out of the text; `none` for the text itself.
        index: of the document in its split.
        digest: of the document's fields.
        document: its fields, as JSON.
        target: the true answer.
        requests: what the model was asked, as JSON: prompt, and continuation or parameters.
        responses: what it answered to each, as JSON: texts, or log-likelihoods with whether the
            continuation is the most likely one.
        metrics: what it contributes, by metric as the whole measurement calls it.
    """

    task: str
    filter: str
    index: int
    digest: str
    document: str
    target: str
    requests: tuple[str, ...]
    responses: tuple[str, ...]
    metrics: Mapping[str, float]


def metric_name(task: str, metric: str, filter_name: str) -> str:
    """`arc_easy/acc`; with the filter, where there is one: `gsm8k/exact_match/strict-match`."""
    parts = (task, metric) if filter_name == NO_FILTER else (task, metric, filter_name)
    return "/".join(parts)


def write_measurement(
    metrics: Mapping[str, float],
    tasks: Mapping[str, Any],
    documents: Sequence[Document],
    directory: Path,
) -> None:
    """Write both files into an existing directory.

    Args:
        metrics: of the whole measurement, finite.
        tasks: by name, plain JSON values: what the harness says of how each was asked.
        documents: of all tasks and filters.
        directory: gets the files.
    """
    table = pa.Table.from_pylist(
        [asdict(each) | {"metrics": sorted(each.metrics.items())} for each in documents], _SCHEMA
    )
    pq.write_table(table, directory / DOCUMENTS_NAME, compression="zstd", store_schema=False)
    summary = {"schema": SCHEMA_VERSION, "metrics": dict(metrics), "tasks": dict(tasks)}
    text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False)
    (directory / SUMMARY_NAME).write_text(f"{text}\n", encoding="utf-8", newline="")


def has_documents(directory: Path) -> bool:
    """Whether an evaluation is a measurement by a harness."""
    return (directory / DOCUMENTS_NAME).exists()


def document_values(directory: Path, metric: str) -> dict[tuple[int, str, str], float]:
    """What each document contributes to a metric.

    Args:
        directory: of a measurement.
        metric: its name.

    Returns:
        By index, task and digest of the document.
    """
    columns = ["index", "task", "digest", "metrics"]
    rows = pq.read_table(directory / DOCUMENTS_NAME, columns=columns).to_pylist()
    return {
        (row["index"], row["task"], row["digest"]): value
        for row in rows
        for name, value in row["metrics"]
        if name == metric
    }


def is_mean(directory: Path, metric: str, value: float) -> bool:
    """Whether a metric is the mean over documents, and not another function of all answers.

    Args:
        directory: of a measurement.
        metric: its name.
        value: of the whole measurement.

    Returns:
        False too where the documents say no numbers (perplexities of texts of unequal length).
    """
    values = document_values(directory, metric).values()
    return bool(values) and isclose(sum(values) / len(values), value, rel_tol=1e-9, abs_tol=1e-12)


def higher_is_better(directory: Path, metric: str) -> bool | None:
    """Whether a larger value of a metric is the better one, as the harness says.

    Args:
        directory: of a measurement.
        metric: its name, of any filter.

    Returns:
        None where the harness does not say, or where it knows no such metric.
    """
    summary = json.loads((directory / SUMMARY_NAME).read_text(encoding="utf-8"))
    said = {
        metric_name(task, name, NO_FILTER): is_better
        for task, about in summary["tasks"].items()
        for name, is_better in (about.get("higher_is_better") or {}).items()
    }
    of_metric = [name for name in said if metric == name or metric.startswith(f"{name}/")]
    return said[max(of_metric, key=len)] if of_metric else None
