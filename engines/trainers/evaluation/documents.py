"""Files of a harness measurement: `summary.json` and `documents.parquet`; imports no torch.

Equal measurements give equal bytes with one version of pyarrow. Metrics that are means of the
documents' values can be compared between models document by document.
"""

import json
from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENTS_NAME = "documents.parquet"
SUMMARY_NAME = "summary.json"
SCHEMA_VERSION = 1
NO_FILTER = "none"
"""The harness's name for unfiltered answers."""

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


Document = Mapping[str, Any]
"""One document of a task, as one filter read its answers: a value for each column.

    filter     extracted the answer from the text; `none` for the whole text
    document   its fields, as JSON; `digest` is their hash
    requests   as JSON: prompt, and continuation or parameters
    responses  as JSON: texts, or log-likelihoods with True if the continuation is the argmax
    metrics    the document's contributions by `metric_name`
"""


def metric_name(task: str, metric: str, filter_name: str) -> str:
    """Return e.g. `arc_easy/acc`, or with a filter `gsm8k/exact_match/strict-match`."""
    return f"{task}/{metric}" + (f"/{filter_name}" if filter_name != NO_FILTER else "")


def write_measurement(
    metrics: Mapping[str, float],
    tasks: Mapping[str, Any],
    documents: Sequence[Document],
    directory: Path,
) -> None:
    """Write both files to `directory`, which exists; `tasks` are JSON values by task name."""
    table = pa.Table.from_pylist(
        [{**each, "metrics": sorted(each["metrics"].items())} for each in documents], _SCHEMA
    )
    pq.write_table(table, directory / DOCUMENTS_NAME, compression="zstd", store_schema=False)
    summary = {"schema": SCHEMA_VERSION, "metrics": dict(metrics), "tasks": dict(tasks)}
    text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False)
    (directory / SUMMARY_NAME).write_text(f"{text}\n", encoding="utf-8", newline="")


def has_documents(directory: Path) -> bool:
    """Return True if a harness made the evaluation in a directory: it then has documents."""
    return (directory / DOCUMENTS_NAME).exists()


def document_values(directory: Path, metric: str) -> dict[tuple[int, str, str], float]:
    """Return each document's contribution to a metric, by index, task and digest."""
    columns = ["index", "task", "digest", "metrics"]
    rows = pq.read_table(directory / DOCUMENTS_NAME, columns=columns).to_pylist()
    return {
        (row["index"], row["task"], row["digest"]): value
        for row in rows
        for name, value in row["metrics"]
        if name == metric
    }


def is_mean(directory: Path, metric: str, value: float) -> bool:
    """Return True if a metric's `value` is the mean of the documents' contributions to it."""
    values = document_values(directory, metric).values()
    return bool(values) and isclose(sum(values) / len(values), value, rel_tol=1e-9, abs_tol=1e-12)


def higher_is_better(directory: Path, metric: str) -> bool | None:
    """Return the direction that the harness gives a metric (of any filter); None if unknown."""
    summary = json.loads((directory / SUMMARY_NAME).read_text(encoding="utf-8"))
    said = {
        metric_name(task, name, NO_FILTER): is_better
        for task, about in summary["tasks"].items()
        for name, is_better in (about.get("higher_is_better") or {}).items()
    }
    of_metric = [name for name in said if metric == name or metric.startswith(f"{name}/")]
    return said[max(of_metric, key=len)] if of_metric else None
