"""From source to rows: what stops a run, what is dropped and counted, what is sampled."""

import json
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import loaded_rows
import pytest

from engines.config.data import SourceConfig
from engines.data.prepare.readers import RawRow
from engines.data.prepare.sources import PREFERENCE_ROWS, RL_ROWS, SFT_ROWS, layout_of
from infra.errors import ConfigError


def rl_line(prompt: object, answer: object = "1") -> dict[str, Any]:
    return {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": answer}}


def write(path: Path, *rows: object) -> SourceConfig:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return SourceConfig(format="rows", path=str(path))


def load(source: SourceConfig, **data: Any) -> loaded_rows.LoadedRows:
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


ODD: tuple[Any, ...] = (
    *(5, 0, 0.5, True, False, ["math"], [], {}, {"a": 1}, [[]], [None], "\ud800", "\x00"),
    *(b"x", date(2000, 1, 1), Decimal("1.5"), float("nan"), 10**400),
)


@pytest.mark.parametrize("cell", [5, 0, True, ["math"], [], {"a": 1}])
def test_an_ability_that_is_no_text_is_a_bad_row(tmp_path: Path, cell: object) -> None:
    odd = {**rl_line("odd"), "ability": cell}
    source = write(tmp_path / "t.jsonl", rl_line("ok"), odd)
    assert error_of(source).startswith("t.jsonl:2: ability is a")
    assert len(load(source, on_bad_row="drop").rows) == 1


def changed(value: Any, cell: object) -> Iterator[Any]:
    """The value with one of its parts at a time replaced, at every depth."""
    yield cell
    items = value.items() if isinstance(value, dict) else ()
    for key, item in (*items, *(enumerate(value) if isinstance(value, list) else ())):
        for part in changed(item, cell):
            copy = value.copy()
            copy[key] = part
            yield copy


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALLS = [
    {"role": "user", "content": "q", "weight": 1},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "name": "f", "content": [{"type": "text", "text": "t"}]},
    {"role": "assistant", "content": "a", "weight": 1},
]
PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
OTHER = [PAIR[0], {"role": "assistant", "content": "b"}]
ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("rows", "rl", {
        **rl_line([{"role": "user", "content": "<image>q"}]), "data_source": "s", "ability": "m",
        "extra_info": {"a": [1]}, "tools": [FUNCTION], "images": [{"bytes": b"x", "path": None}],
    }),
    ("messages", "sft", {"messages": CALLS, "tools": [FUNCTION], "data_source": "s"}),
    ("sharegpt", "sft", {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "system": "s", "tools": [FUNCTION],
    }),
    ("alpaca", "sft", {
        "instruction": "i", "input": "n", "output": "o", "system": "s", "history": [["q", "a"]],
    }),
    ("columns", "rl", {"prompt": "q", "answer": "a"}),
    ("gsm8k", "rl", {"question": "q", "answer": "a\n#### 1"}),
    ("math", "rl", {"problem": "q", "solution": "\\boxed{1}", "answer": "1", "level": "1"}),
    ("openr1_math", "sft", {
        "problem": "q", "solution": "s", "answer": "1", "messages": PAIR, "generations": ["g"],
    }),
    ("dapo_math_17k", "rl", {**rl_line("q"), "ability": "m", "extra_info": {"index": "1"}}),
    ("geometry3k", "rl", {"problem": "q", "answer": "1", "images": [{"bytes": b"x"}]}),
    ("xlam", "rl", {
        "query": "q", "tools": [FUNCTION], "answers": [{"name": "f", "arguments": {"a": 1}}],
    }),
    ("pairs", "preference", {
        "prompt": "q", "chosen": PAIR, "rejected": OTHER, "margin": 1.0, "data_source": "s",
    }),
    ("hh_rlhf", "preference", {
        "chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b",
    }),
    ("ultrafeedback", "preference", {
        "prompt": "q", "prompt_id": "i", "chosen": PAIR, "rejected": OTHER, "score_chosen": 2.0,
        "score_rejected": 1.0,
    }),
)  # fmt: skip
KINDS = {"rl": RL_ROWS, "sft": SFT_ROWS, "preference": PREFERENCE_ROWS}


@pytest.mark.parametrize(("name", "split", "columns"), ROWS)
def test_no_cell_is_so_odd_that_its_row_is_not_bad(
    name: str, split: str, columns: dict[str, Any]
) -> None:
    """Every part of a row is replaced by what no such part can be: a row, or a bad one."""
    layout = layout_of(SourceConfig(path="t", format=name), "data.rl.0", KINDS[split])  # type: ignore[arg-type]
    for cell in (*ODD, None, "", " "):
        for given in changed(columns, cell):
            if isinstance(given, dict):
                layout.row(RawRow("t:1", given))


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
