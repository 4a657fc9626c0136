"""Measurements of a harness as files, and two of them document by document."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engines.trainers.evaluation.comparison import compared_metrics, metric_gain
from engines.trainers.evaluation.documents import (
    document_values,
    higher_is_better,
    is_mean,
    metric_name,
    write_measurement,
)
from infra.errors import ConfigError

ACC, PERPLEXITY = "arc/acc", "arc/perplexity"


def measurement(
    directory: Path,
    values: list[float],
    perplexity: float,
    first: int = 0,
    higher_is_better: bool | None = True,
) -> Path:
    """Of one document for each value; a perplexity is no mean of what they contribute."""
    directory.mkdir()
    documents = [
        {
            "task": "arc",
            "filter": "none",
            "index": index,
            "digest": f"d{index}",
            "document": '{"question": "?"}',
            "target": "1",
            "requests": ['["?", " 1"]', '["?", " 2"]'],
            "responses": ["[[-1.5, true]]", "[[-2.5, false]]"],
            "metrics": {ACC: value, PERPLEXITY: -1.0},
        }
        for index, value in enumerate(values, first)
    ]
    metrics = {ACC: sum(values) / len(values), PERPLEXITY: perplexity, f"{ACC}_low": 0.0}
    tasks = {"arc": {"version": "1.0", "higher_is_better": {"acc": higher_is_better}}}
    write_measurement(metrics, tasks, documents, directory)
    return directory


def test_everything_that_was_asked_and_answered_is_there(tmp_path: Path) -> None:
    directory = measurement(tmp_path / "a", [1.0, 0.0], 2.5)
    [first, _] = pq.read_table(directory / "documents.parquet").to_pylist()
    assert first == {
        "task": "arc",
        "filter": "none",
        "index": 0,
        "digest": "d0",
        "document": '{"question": "?"}',
        "target": "1",
        "requests": ['["?", " 1"]', '["?", " 2"]'],
        "responses": ["[[-1.5, true]]", "[[-2.5, false]]"],
        "metrics": [(ACC, 1.0), (PERPLEXITY, -1.0)],
    }
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["metrics"] == {ACC: 0.5, PERPLEXITY: 2.5, f"{ACC}_low": 0.0}
    assert summary["tasks"] == {"arc": {"version": "1.0", "higher_is_better": {"acc": True}}}
    again = measurement(tmp_path / "b", [1.0, 0.0], 2.5)
    for name in ("documents.parquet", "summary.json"):
        assert (again / name).read_bytes() == (directory / name).read_bytes()


def test_a_filter_is_a_part_of_the_name() -> None:
    assert metric_name("gsm8k", "exact_match", "strict-match") == "gsm8k/exact_match/strict-match"
    assert metric_name("arc", "acc", "none") == ACC


def test_only_means_over_documents_are_compared(tmp_path: Path) -> None:
    ours = measurement(tmp_path / "ours", [1.0] * 8 + [0.0], 2.5)
    theirs = measurement(tmp_path / "theirs", [0.0] * 8 + [1.0], 3.5)
    assert document_values(ours, ACC)[8, "arc", "d8"] == 0.0
    assert is_mean(ours, ACC, 8 / 9)
    assert not is_mean(ours, PERPLEXITY, 2.5)
    assert not is_mean(ours, f"{ACC}_low", 0.0)
    assert compared_metrics(ours, theirs) == [ACC]
    gain = metric_gain(ours, theirs, ACC, 0.95, 0)
    # Of nine fair signs the sum is at most 5 in 1 - 10/512 of all cases, at most 3 in 1 - 46/512.
    assert (gain.gain, gain.margin) == (pytest.approx(7 / 9), pytest.approx(5 / 9))
    assert (gain.num_problems, gain.verdict) == (9, "better")


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (True, True, "better"),
        (False, False, "worse"),
        (None, None, "higher"),
        (True, False, "higher"),
        (None, False, "higher"),
    ],
)
def test_the_verdict_goes_by_what_the_harness_calls_better(
    ours: bool | None, theirs: bool | None, verdict: str, tmp_path: Path
) -> None:
    much = measurement(tmp_path / "much", [0.9] * 9, 2.5, higher_is_better=ours)
    little = measurement(tmp_path / "little", [0.1] * 9, 2.5, higher_is_better=theirs)
    gain = metric_gain(much, little, ACC, 0.95, 0)
    assert (gain.gain, gain.verdict) == (pytest.approx(0.8), verdict)
    opposite = {"better": "worse", "worse": "better", "higher": "lower"}
    assert metric_gain(little, much, ACC, 0.95, 0).verdict == opposite[verdict]
    assert metric_gain(much, much, ACC, 0.95, 0).verdict == "alike"


def test_metric_direction_is_found_by_task_and_metric_only(tmp_path: Path) -> None:
    tasks = {
        "a": {"higher_is_better": {"acc": True, "acc/of": False}},
        "a/b": {"higher_is_better": {"acc": False}},
        "c": {"higher_is_better": None},
        "d": {},
    }
    write_measurement({}, tasks, [], tmp_path)
    names = ("a/acc", "a/acc/strict", "a/acc/of/x", "a/b/acc", "a/accurate", "c/acc", "d/acc", "e")
    found = {name: higher_is_better(tmp_path, name) for name in names}
    assert found == {
        "a/acc": True, "a/acc/strict": True, "a/acc/of/x": False, "a/b/acc": False,
        "a/accurate": None, "c/acc": None, "d/acc": None, "e": None,
    }  # fmt: skip


def test_other_documents_are_not_compared(tmp_path: Path) -> None:
    ours = measurement(tmp_path / "ours", [1.0, 0.0], 2.5)
    others = measurement(tmp_path / "others", [1.0, 0.0], 2.5, first=1)
    with pytest.raises(ConfigError, match="got other problems than those of the candidate"):
        metric_gain(ours, others, ACC, 0.95, 0)
