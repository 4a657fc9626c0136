"""Write `summary.json` and `rows.parquet` of an evaluation; equal evaluations give equal bytes."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engines.trainers.evaluation.evaluator import Answer, EvaluatedProblem, Evaluation

ROWS_NAME = "rows.parquet"
SUMMARY_NAME = "summary.json"
SCHEMA_VERSION = 1

_ANSWER = pa.struct(
    [
        ("text", pa.string()),
        ("score", pa.float64()),
        ("correct", pa.bool_()),
        ("finish_reason", pa.string()),
        ("num_tokens", pa.int32()),
        ("answer", pa.string()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("images", pa.list_(pa.string())),
        ("greedy", _ANSWER),
        ("samples", pa.list_(_ANSWER)),
    ]
)


def write_evaluation(evaluation: Evaluation, directory: Path) -> None:
    """Write both files into an existing directory."""
    table = pa.Table.from_pylist([_row(problem) for problem in evaluation.problems], _SCHEMA)
    pq.write_table(table, directory / ROWS_NAME, compression="zstd", store_schema=False)
    summary = {
        "schema": SCHEMA_VERSION,
        "metrics": evaluation.metrics,
        "sources": evaluation.sources,
    }
    text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False)
    (directory / SUMMARY_NAME).write_text(text + "\n", encoding="utf-8", newline="")


def _row(problem: EvaluatedProblem) -> dict[str, object]:
    return {
        "index": problem.prompt.index,
        "data_source": problem.prompt.row.data_source,
        "prompt": problem.prompt_text,
        "ground_truth": problem.ground_truth,
        "images": problem.image_digests,
        "greedy": _answer(problem.greedy),
        "samples": [_answer(answer) for answer in problem.samples],
    }


def _answer(answer: Answer) -> dict[str, object]:
    return {
        "text": answer.text,
        "score": answer.score,
        "correct": answer.correct,
        "finish_reason": answer.finish_reason,
        "num_tokens": answer.num_tokens,
        "answer": answer.answer,
    }
