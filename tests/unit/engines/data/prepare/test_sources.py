"""From source to rows: what stops a run, what is dropped and counted, what is sampled."""

import json
from pathlib import Path
from typing import Any

import loaded_rows
import pytest

from engines.config.data import SourceConfig
from engines.data.prepare.sources import LoadedRows
from infra.errors import ConfigError


def rl_line(prompt: object, answer: object = "1") -> dict[str, Any]:
    return {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": answer}}


def write(path: Path, *rows: object) -> SourceConfig:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return SourceConfig(format="rows", path=str(path))


def load(source: SourceConfig, **data: Any) -> LoadedRows[Any]:
    return loaded_rows.load("rl", source, **data)


def error_of(source: SourceConfig, **data: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(source, **data)
    return str(error.value)


def test_a_null_prompt_names_the_row_and_counts_its_like(tmp_path: Path) -> None:
    rows = [rl_line("ok"), rl_line(None), rl_line("ok"), rl_line(None), rl_line("")]
    source = write(tmp_path / "train.jsonl", *rows)
    assert error_of(source) == (
        "train.jsonl:2: prompt is null (2 such rows; set data.on_bad_row=drop to skip and count)"
    )
    loaded = load(source, on_bad_row="drop")
    assert len(loaded.rows) == 2
    assert loaded.reports[0].num_bad == {"prompt is null": 2, "prompt is empty": 1}
    assert loaded.reports[0].num_read == 5


def test_a_bad_json_line_stops_at_once_or_is_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "train.jsonl", rl_line("ok"), '{"prompt": "a"', rl_line("b"))
    assert error_of(source) == (
        'train.jsonl:2: not JSON (Expecting \',\' delimiter at column 15): {"prompt": "a"'
    )
    assert load(source, on_bad_row="drop").reports[0].num_bad == {"unreadable": 1}


def test_roles_out_of_order(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "hi"}]
    source = write(tmp_path / "train.jsonl", {"messages": turns})
    source = source.model_copy(update={"format": "messages"})
    with pytest.raises(ConfigError) as error:
        loaded_rows.load("sft", source)
    assert str(error.value).startswith(
        "train.jsonl:1: messages[0].role is 'assistant'; need system or user (1 such row;"
    )


def test_an_absent_column_is_the_configuration_s_fault(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", {"prompt": "q", "answer": "a"}, {"prompt": "q"})
    assert error_of(source) == (
        "data.rl.0.format: 'reward_model' not in t.jsonl; columns: prompt, answer; these columns "
        "fit: columns"
    )
    options = {"prompt_column": "question"}
    source = source.model_copy(update={"format": "columns", "options": options})
    assert error_of(source) == (
        "data.rl.0.options.prompt_column: 'question' not in t.jsonl; columns: prompt, answer"
    )


def test_a_column_absent_from_one_row_is_that_row_s_fault(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", rl_line("a"), {"prompt": "b"})
    assert error_of(source).startswith("t.jsonl:2: reward_model is missing (1 such row;")


def test_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert error_of(write(path)) == f"data.rl.0.path: {path}: 0 rows; need at least 1"
    source = write(path, rl_line(None))
    assert error_of(source, on_bad_row="drop") == (
        f"data.rl.0.path: {path}: 0 rows of 1 are usable; need at least 1"
    )


def test_limit_takes_a_seeded_sample(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", *(rl_line(f"q{i}") for i in range(50)))
    limited = source.model_copy(update={"limit": 10})
    samples = [loaded_rows.load("rl", limited, seed=seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert len(set(samples[0].rows[i].prompt for i in range(10))) == 10
    assert samples[0].reports[0].num_over_limit == 40
    everything = load(source)
    assert [row.prompt[0].content for row in everything.rows] == [f"q{i}" for i in range(50)]


def test_sources_follow_each_other(tmp_path: Path) -> None:
    sources = (
        write(tmp_path / "a.jsonl", rl_line("a1"), rl_line("a2")),
        write(tmp_path / "b.jsonl", rl_line("b1")),
    )
    loaded = loaded_rows.load("evaluation", *sources)
    assert [row.prompt[0].content for row in loaded.rows] == ["a1", "a2", "b1"]
    assert [report.num_rows for report in loaded.reports] == [2, 1]
