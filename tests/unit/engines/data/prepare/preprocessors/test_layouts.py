"""Original column layouts of known data sets, on small files in those layouts."""

import json
from pathlib import Path
from typing import Any

import loaded_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config.data import SourceConfig
from engines.config.plugins import register_plugin
from engines.data.prepare.preprocessors.gsm8k import split_solution
from engines.data.prepare.preprocessors.math import last_boxed
from engines.data.prepare.sources import create_preprocessor
from engines.data.read.rows import Message, RLRow, RowError, SFTRow
from infra.errors import ConfigError

GSM8K = {
    "question": "Ann sold 48 clips in April and half as many in May. How many in all? ",
    "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\n"
    "In all 48+24 = <<48+24=72>>72 thousand.\n#### 1,072",
}
MATH = {
    "problem": "What is $\\frac{1}{4}+\\frac14$?",
    "level": "Level 2",
    "type": "Algebra",
    "solution": "It is $\\boxed{\\frac{2}{4}}$, which is $\\boxed{\\frac{1}{2}}$.",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: 17+17. End with Answer: $n$.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}


def rl(path: Path, layout: str, **options: Any) -> tuple[RLRow, ...]:
    source = SourceConfig(format=layout, path=str(path), options=options)
    return loaded_rows.load("rl", source).rows


def sft(path: Path, layout: str, **options: Any) -> tuple[SFTRow, ...]:
    source = SourceConfig(format=layout, path=str(path), options=options)
    return loaded_rows.load("sft", source).rows


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_gsm8k_from_the_hub_layout(tmp_path: Path) -> None:
    parquet(tmp_path / "main" / "train-00000-of-00001.parquet", GSM8K)
    parquet(tmp_path / "main" / "test-00000-of-00001.parquet", {**GSM8K, "question": "other?"})
    parquet(tmp_path / "socratic" / "train-00000-of-00001.parquet", GSM8K, GSM8K)
    (row,) = rl(tmp_path, "gsm8k")
    assert row.reward_model.ground_truth == "1072"
    assert row.data_source == "openai/gsm8k"
    question = row.prompt[0].content
    assert question.startswith(
        "Ann sold 48 clips in April and half as many in May. How many in all?\n"
    )
    assert question.endswith("\\boxed{}.")
    (example,) = sft(tmp_path, "gsm8k", instruction="")
    assert example.messages == (
        Message("user", GSM8K["question"].strip()),
        Message(
            "assistant",
            "In May she sold 48/2 = 24 clips.\nIn all 48+24 = 72 thousand.\n"
            "The answer is \\boxed{1072}.",
        ),
    )


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("x\n#### 5", "5"),
        ("x #### -3.5 ", "-3.5"),
        ("x\n#### 1,234,567", "1234567"),
        ("#### .5", ".5"),
    ],
)
def test_gsm8k_final_numbers(answer: str, number: str) -> None:
    assert split_solution(answer)[1] == number


def test_gsm8k_without_a_final_number() -> None:
    with pytest.raises(RowError, match="answer does not end with '#### '"):
        split_solution("it is 5")


def test_math_from_one_file_per_problem(tmp_path: Path) -> None:
    for split, subject, answer in (("train", "algebra", "2"), ("test", "algebra", "3")):
        path = tmp_path / split / subject / "1.json"
        path.parent.mkdir(parents=True)
        problem = {**MATH, "solution": f"so \\boxed{{{answer}}}"}
        path.write_text(json.dumps(problem, indent=4), encoding="utf-8")
    (row,) = rl(tmp_path, "math")
    assert row.reward_model.ground_truth == "2"


def test_math_from_a_table(tmp_path: Path) -> None:
    path = parquet(tmp_path / "math.parquet", MATH)
    (row,) = rl(path, "math", data_source="lighteval/MATH")
    assert row.reward_model.ground_truth == "\\frac{1}{2}"
    assert row.extra_info == {"level": "Level 2", "type": "Algebra"}
    assert row.data_source == "lighteval/MATH"
    (example,) = sft(path, "math")
    assert example.messages[1].content == MATH["solution"]


OPENR1 = {
    **MATH,
    "answer": "\\frac{1}{2}",
    "problem_type": "Algebra",
    "question_type": "math-word-problem",
    "source": "olympiads",
    "uuid": "0586ba54",
    "is_reasoning_complete": [True, False],
    "generations": ["<think>\nEasy.\n</think>\n\n\\boxed{\\frac{1}{2}}", "<think>\nHard"],
    "correctness_math_verify": [True, False],
    "finish_reasons": ["stop", "length"],
    "correctness_count": 1,
    "messages": [
        {"content": MATH["problem"], "role": "user"},
        {"content": "<think>\nEasy.\n</think>\n\n\\boxed{\\frac{1}{2}}", "role": "assistant"},
    ],
}


def test_openr1_math_from_the_hub_layout(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00001.parquet", OPENR1)
    parquet(tmp_path / "all" / "default-00000-of-00001.parquet", OPENR1)
    parquet(tmp_path / "extended" / "train-00000-of-00001.parquet", OPENR1)
    (row,) = rl(tmp_path, "openr1_math")
    assert row.reward_model.ground_truth == "\\frac{1}{2}"
    assert row.prompt[0].content.endswith(
        "?\nReason step by step and put the final answer in \\boxed{}."
    )
    assert row.extra_info == {
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "source": "olympiads",
        "uuid": "0586ba54",
    }
    (example,) = sft(tmp_path, "openr1_math")
    # One prompt in both kinds of training.
    assert example.messages == (*row.prompt, Message("assistant", OPENR1["generations"][0]))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"answer": None}, "answer is null; need text"),
        ({"problem": " "}, "problem is empty"),
    ],
)
def test_openr1_math_without_what_it_needs(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    path = parquet(tmp_path / "t.parquet", OPENR1, {**OPENR1, **changed})
    with pytest.raises(ConfigError) as error:
        rl(path, "openr1_math")
    assert str(error.value).startswith(f"t.parquet row 1: {problem}")


def test_openr1_math_without_a_right_generation(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", OPENR1, {**OPENR1, "messages": None})
    with pytest.raises(ConfigError, match=r"^t\.parquet row 1: messages is null; need a list"):
        sft(path, "openr1_math")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{7}", "7"),
        ("a \\boxed{1} then $\\boxed{\\text{if } x = \\{1, 2\\}}$.", "\\text{if } x = \\{1, 2\\}"),
        ("$\\fbox{\\frac{3}{4}}$", "\\frac{3}{4}"),
        ("$\\boxed 9$.", "9"),
        ("\\boxed{ (1, {2}) }", "(1, {2})"),
    ],
)
def test_last_boxed(solution: str, answer: str) -> None:
    assert last_boxed(solution) == answer


@pytest.mark.parametrize(
    "solution", ["none", "\\boxed{", "\\boxed{}", "\\boxed", "\\boxed x{", "}\\boxed}"]
)
def test_last_boxed_refuses_or_answers(solution: str) -> None:
    if solution == "\\boxed x{":
        assert last_boxed(solution) == "x{"
    else:
        with pytest.raises(RowError):
            last_boxed(solution)


@given(st.text(alphabet="ab{}\\ $", max_size=30))
def test_last_boxed_finds_what_was_boxed_or_refuses(text: str) -> None:
    try:
        answer = last_boxed(f"x \\boxed{{{text}}} end")
    except RowError:
        return
    assert answer
    assert answer == answer.strip()


def test_dapo_repeats_are_counted_and_dropped(tmp_path: Path) -> None:
    other = {**DAPO, "prompt": [{"content": "2+2?", "role": "user"}]}
    path = parquet(tmp_path / "data" / "dapo-math-17k.parquet", DAPO, other, DAPO, DAPO)
    source = SourceConfig(format="dapo_math_17k", path=str(tmp_path))
    loaded = loaded_rows.load("rl", source)
    assert [row.prompt[0].content for row in loaded.rows] == [DAPO["prompt"][0]["content"], "2+2?"]
    assert loaded.reports[0].num_duplicates == 2
    assert loaded.rows[0].reward_model.ground_truth == "34"
    assert loaded.rows[0].extra_info == DAPO["extra_info"]
    assert len(rl(path, "dapo_math_17k", drop_duplicates=False)) == 4
    with pytest.raises(ConfigError, match=r"data\.sft\.0\.format: this layout has no answers"):
        sft(path, "dapo_math_17k")


def test_columns_of_any_table(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"q": "1+1", "a": 2, "x": null}\n', encoding="utf-8")
    options = {
        "prompt_column": "q",
        "answer_column": "a",
        "system": "Be brief.",
        "instruction": "?",
    }
    (row,) = rl(path, "columns", **options)
    assert row.prompt == (Message("system", "Be brief."), Message("user", "1+1 ?"))
    assert row.reward_model.ground_truth == "2"
    assert sft(path, "columns", **options)[0].messages[-1] == Message("assistant", "2")


def test_rows_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(DAPO) + "\n", encoding="utf-8")
    assert rl(path, "rows") == rl(path, "dapo_math_17k")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path.write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    assert sft(path, "messages")[0].messages == (Message("user", "q"), Message("assistant", "a"))
    with pytest.raises(
        ConfigError, match=r"data\.rl\.0\.format: this layout has no answers to check"
    ):
        rl(path, "messages")


def test_unknown_layout_and_option() -> None:
    source = SourceConfig(path="x", format="gsmk8")
    with pytest.raises(
        ConfigError, match=r"data\.rl\.2\.format: no 'gsmk8'; known: .*mean gsm8k\?"
    ):
        create_preprocessor(source, "data.rl.2")
    source = SourceConfig(path="x", format="gsm8k", options={"instructions": "x"})
    with pytest.raises(
        ConfigError,
        match=r"data\.rl\.2\.options\.instructions: not an option of gsm8k",
    ):
        create_preprocessor(source, "data.rl.2")


def test_a_name_belongs_to_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.plugins._registered", [])
    register_plugin("preprocessor", "gsm8k", "elsewhere:GSM8K")
    with pytest.raises(ConfigError, match="'gsm8k' is registered by both this project and else"):
        create_preprocessor(SourceConfig(path="x", format="gsm8k"), "data.rl.0")
