"""Layouts are recognised by what rows hold; what is not one layout alone is refused."""

import json
from pathlib import Path
from typing import Any

import loaded_rows
import pytest

from engines.config.data import SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.model import ModelConfig
from engines.config.options import check_preprocessors
from engines.config.plugins import PREPROCESSORS, recognised_layouts, register_plugin
from engines.config.stages.data import PreprocessStageConfig
from engines.data.prepare.sources import (
    ROW_KINDS,
    first_usable_row,
)
from infra.errors import ConfigError

Q = {"role": "user", "content": "q"}
A, B = ({"role": "assistant", "content": text} for text in "ab")
GSM8K = {"question": "1+1?", "answer": "Two.\n#### 2"}
MATH = {"problem": "1+1?", "solution": "\\boxed{2}", "level": "1"}
OPENR1 = {**MATH, "answer": "2", "messages": [Q, A], "generations": ["a"]}
XLAM = {
    "id": 0,
    "query": "q",
    "answers": '[{"name": "f", "arguments": {}}]',
    "tools": '[{"name": "f", "description": "d", "parameters": {}}]',
}
HUMAN = "\n\nHuman: q\n\nAssistant: "
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("rl", "rows", {"prompt": [Q], "reward_model": {"ground_truth": "1"}, "ability": "x"}),
    ("rl", "columns", {"prompt": "q", "answer": "1"}),
    ("rl", "gsm8k", GSM8K),
    ("rl", "math", MATH),
    ("sft", "messages", {"messages": [Q, A], "prompt": "q"}),
    ("sft", "sharegpt", {"conversations": [{"from": "human", "value": "q"}, A]}),
    ("sft", "alpaca", {"instruction": "q", "input": "", "output": "a", "text": "q a"}),
    ("sft", "columns", {"prompt": "q", "answer": "a"}),
    ("sft", "gsm8k", GSM8K),
    ("sft", "math", MATH),
    ("rl", "openr1_math", OPENR1),
    ("sft", "openr1_math", OPENR1),
    ("rl", "xlam", XLAM),
    ("sft", "xlam", XLAM),
    ("preference", "pairs", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    ("preference", "pairs", {"chosen": [Q, A], "rejected": [Q, B]}),
    ("preference", "hh_rlhf", {"chosen": f"{HUMAN}a", "rejected": f"{HUMAN}b"}),
    (
        "preference",
        "ultrafeedback",
        {
            "prompt": "q",
            "prompt_id": "0",
            "chosen": [Q, A],
            "rejected": [Q, B],
            "messages": [Q, A],
            "score_chosen": 8.0,
            "score_rejected": 8.0,
        },
    ),
]


def write(path: Path, *rows: object) -> SourceConfig:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return SourceConfig(path=str(path))


def load(source: SourceConfig, split: str, **data: Any) -> Any:
    return loaded_rows.load(split, source, **data)


def error_of(source: SourceConfig, split: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(source, split)
    return str(error.value)


@pytest.mark.parametrize(("split", "layout", "row"), ROWS)
def test_every_layout_is_recognised(
    tmp_path: Path, split: str, layout: str, row: dict[str, Any]
) -> None:
    source = write(tmp_path / "t.jsonl", row)
    assert source.format == "auto"
    found = load(source, split)
    assert found.reports[0].format == layout
    named = source.model_copy(update={"format": layout})
    assert load(named, split) == found
    assert first_usable_row(source, f"data.{split}.0", ROW_KINDS[split]) == found.rows[0]


def test_problems_with_answers_are_not_all_of_one_set(tmp_path: Path) -> None:
    math_500 = {**MATH, "answer": "2", "subject": "Algebra", "unique_id": "test/algebra/1.json"}
    found = load(write(tmp_path / "t.jsonl", math_500), "rl")
    assert found.reports[0].format == "math"
    (row,) = found.rows
    assert (row.data_source, row.reward_model.ground_truth) == ("math", "2")
    assert row.extra_info == {name: math_500[name] for name in ("level", "subject", "unique_id")}
    # The columns of NuminaMath 1.5, from which OpenR1-Math takes its problems.
    numina = {**MATH, "answer": "3", "problem_type": "Algebra", "question_type": "MCQ"}
    (row,) = load(write(tmp_path / "t.jsonl", numina), "rl").rows
    assert (row.data_source, row.reward_model.ground_truth) == ("math", "3")


def test_each_that_can_be_recognised_is_tried_above() -> None:
    # Geometry3k has images, which only a table holds; its own tests find it.
    assert {layout for _, layout, _ in ROWS} | {"geometry3k"} == {*recognised_layouts()}


def test_rows_that_cannot_be_used_are_reported_as_ever(tmp_path: Path) -> None:
    bad = {"messages": [Q]}
    source = write(tmp_path / "t.jsonl", "{", bad, {"messages": [Q, A]})
    assert error_of(source, "sft").startswith("t.jsonl:1: not JSON")
    source = write(tmp_path / "t.jsonl", bad, {"messages": [Q, A]})
    assert error_of(source, "sft").startswith("t.jsonl:1: messages[0].role is 'user'; need ass")
    assert load(source, "sft", on_bad_row="drop").reports[0].num_rows == 1


def test_an_unknown_layout(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", {"text": "a"}, {"label": 1})
    assert error_of(source, "sft") == (
        "data.sft.0.format: got auto; columns of t.jsonl: text, label; need those of one layout: "
        "messages (messages), sharegpt (conversations), alpaca (instruction, output), "
        "columns (prompt, answer), gsm8k (question, answer), math (problem, solution), "
        "openr1_math (problem, solution, answer, messages, generations), "
        "xlam (query, tools, answers); or name a format, with its options"
    )


def test_the_right_columns_with_other_values(tmp_path: Path) -> None:
    source = write(tmp_path / "t.csv", "question,answer", "q,a")
    assert error_of(source, "rl").startswith(
        "data.rl.0.format: got auto; columns of t.csv: question, answer; gsm8k cannot read t.csv:2 "
        "(answer does not end with '#### ' and a number); need those of one layout: rows (prompt, "
    )
    assert error_of(source, "rl").endswith(
        "; or name a format, with its options, as {format: columns, options: {prompt_column: "
        "question}}"
    )
    named = source.model_copy(
        update={"format": "columns", "options": {"prompt_column": "question"}}
    )
    assert load(named, "rl").rows[0].reward_model.ground_truth == "a"
    source = write(tmp_path / "t.csv", "id,problem,answer", "1,q,a")
    assert error_of(source, "sft").endswith("{prompt_column: problem}}")


def test_two_layouts_at_once(tmp_path: Path) -> None:
    both = {"messages": [Q, A], "instruction": "q", "output": "a"}
    source = write(tmp_path / "t.jsonl", both)
    assert error_of(source, "sft") == (
        "data.sft.0.format: got auto; columns of t.jsonl: messages, instruction, output; messages, "
        "alpaca all fit; need one; name it"
    )
    named = source.model_copy(update={"format": "alpaca"})
    assert load(named, "sft").rows[0].data_source == "alpaca"


def test_nothing_to_recognise(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl")
    assert error_of(source, "sft") == f"data.sft.0.path: {source.path}: 0 rows; need at least 1"
    source = write(tmp_path / "t.jsonl", "{", "[]")
    assert error_of(source, "sft").startswith("t.jsonl:1: not JSON")


def test_a_directory_and_the_folder_that_its_layout_prefers(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train.jsonl", GSM8K)
    write(tmp_path / "socratic" / "train.jsonl", GSM8K)
    assert load(SourceConfig(path=str(tmp_path)), "rl").reports[0].num_read == 1


def test_options_need_a_name(tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", ROWS[1][2])
    data = DataConfig(rl=(source,))
    check_preprocessors(data)
    given = source.model_copy(update={"options": {"prompt_column": "question"}})
    with pytest.raises(ConfigError) as error:
        check_preprocessors(data.model_copy(update={"rl": (given,)}))
    assert str(error.value) == (
        "data.rl.0.options: got prompt_column; format auto takes none; name the format"
    )


def test_a_layout_that_wants_more_columns_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graded_layout.py").write_text(
        "from engines.data.prepare.preprocessors.alpaca import Alpaca, AlpacaOptions\n"
        "class Graded(Alpaca):\n"
        "    sft_columns = ('instruction', 'output', 'grade')\n"
        "    def __init__(self, options):\n"
        "        super().__init__(AlpacaOptions(data_source='graded'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("infra.plugins._registered", [])
    source = write(tmp_path / "t.jsonl", {"instruction": "q", "output": "a", "grade": 5})
    assert load(source, "sft").reports[0].format == "alpaca"
    register_plugin("preprocessor", "graded", "graded_layout:Graded")
    assert load(source, "sft").reports[0].format == "alpaca"
    monkeypatch.setattr("infra.plugins._registered", [])
    register_plugin("preprocessor", "graded", "graded_layout:Graded", recognised=True)
    assert load(source, "sft").rows[0].data_source == "graded"


@pytest.mark.parametrize("split", SOURCE_SPLITS)
def test_every_layout_that_may_be_found_counts(split: str) -> None:
    auto, named = (
        PreprocessStageConfig(
            data=DataConfig.model_validate({split: [{"path": "a/b", "format": name}]}),
            model=ModelConfig(init="random"),
        )
        for name in ("auto", "alpaca")
    )
    modules = {row.module for row in PREPROCESSORS.rows if row.recognised}
    assert {*auto.plugin_modules()} == modules
    assert len(named.plugin_modules()) == 1
