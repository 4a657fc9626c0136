"""Supervised rows in the layouts that people bring: one conversation, and what breaks a row."""

import csv
import json
from pathlib import Path
from typing import Any

import loaded_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config.data import DataConfig, SourceConfig
from engines.config.model import ModelConfig, TokenizerConfig
from engines.data.prepare.dataset import build_dataset
from engines.data.prepare.sources import create_preprocessor
from engines.data.read.chat import render_conversations
from engines.data.read.dataset import load_dataset
from engines.data.read.rows import Message, RowError, SFTRow
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError

CHAT = (
    Message("system", "Be brief."),
    Message("user", "1+1?"),
    Message("assistant", "2"),
    Message("user", "List:\n3, 4"),
    Message("assistant", "3 and 4"),
)
OPENAI = {"messages": [{"role": m.role, "content": m.content} for m in CHAT]}
FROM = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = {
    "id": "a_0",
    "conversations": [{"from": FROM[m.role], "value": m.content} for m in CHAT],
}
ALPACA = {
    "instruction": "List:",
    "input": "3, 4",
    "output": "3 and 4",
    "system": "Be brief.",
    "history": [["1+1?", "2"]],
}
LAYOUTS = {"messages": OPENAI, "sharegpt": SHAREGPT, "alpaca": ALPACA}


def rows_of(path: Path, layout: str, **options: Any) -> tuple[SFTRow, ...]:
    source = SourceConfig(format=layout, path=str(path), options=options)
    return loaded_rows.load("sft", source).rows


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def table(path: Path, row: dict[str, Any]) -> Path:
    """A file of one row, in the form that its suffix says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif path.suffix == ".csv":
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(texts))
            writer.writeheader()
            writer.writerow(texts)
    else:
        lines(path, row)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_conversation_in_every_layout_and_file(
    tmp_path: Path, layout: str, suffix: str
) -> None:
    (row,) = rows_of(table(tmp_path / f"t{suffix}", LAYOUTS[layout]), layout)
    assert row.messages == CHAT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_on_the_answers_alone(tmp_path: Path, layout: str) -> None:
    source = SourceConfig(format=layout, path=str(lines(tmp_path / "t.jsonl", LAYOUTS[layout])))
    model = ModelConfig(init="random", tokenizer=TokenizerConfig(), max_length=128)
    build_dataset(DataConfig(sft=(source,)), model, 0, tmp_path / "out")
    dataset = load_dataset(tmp_path / "out")
    assert dataset.tokenizer_dir
    tokenizer = DirectoryTokenizer.load(dataset.tokenizer_dir)
    (rendered,) = render_conversations(tokenizer, [row.messages for row in dataset.sft_rows()])
    pairs = list(zip(rendered.input_ids, rendered.loss_mask, strict=True))
    trained = tokenizer.decode([token for token, mask in pairs if mask])
    assert trained == "2<|end|>3 and 4<|end|>"
    assert tokenizer.decode([token for token, mask in pairs if not mask]) == (
        "<|system|>Be brief.<|user|>1+1?<|assistant|><|user|>List:\n3, 4<|assistant|>"
    )


def test_tools_and_both_ways_of_writing_turns(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": ""},
        {"from": "human", "value": "Weather?", "weight": 0.0},
        {"role": "assistant", "content": "<tool_call>weather()</tool_call>"},
        {"from": "tool", "value": "rain"},
        {"from": "observation", "value": "wind"},
        {"from": "gpt", "value": "Wet.", "weight": 1.0},
    ]
    row = {"conversations": turns, "system": "S"}
    rows = rows_of(lines(tmp_path / "t.jsonl", row), "sharegpt")
    assert rows_of(table(tmp_path / "t.parquet", row), "sharegpt") == rows
    roles = [message.role for message in rows[0].messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert rows[0].messages[0].content == "S"
    assert rows[0].data_source == "sharegpt"


def test_a_model_made_from_scratch_reads_what_tools_returned(tmp_path: Path) -> None:
    turns = [("human", "a"), ("gpt", "b"), ("tool", "c"), ("gpt", "d")]
    row = {"conversations": [{"from": who, "value": said} for who, said in turns]}
    source = SourceConfig(format="sharegpt", path=str(lines(tmp_path / "t.jsonl", row)))
    model = ModelConfig(init="random", tokenizer=TokenizerConfig(), max_length=128)
    build_dataset(DataConfig(sft=(source,)), model, 0, tmp_path / "out")
    tokenizer = DirectoryTokenizer.load(tmp_path / "out" / "tokenizer")
    conversations = [each.messages for each in load_dataset(tmp_path / "out").sft_rows()]
    (rendered,) = render_conversations(tokenizer, conversations)
    text = tokenizer.decode(rendered.input_ids)
    assert text == "<|user|>a<|assistant|>b<|end|><|tool|>c<|assistant|>d<|end|>"
    pairs = zip(rendered.input_ids, rendered.loss_mask, strict=True)
    assert tokenizer.decode([token for token, mask in pairs if mask]) == "b<|end|>d<|end|>"


def test_alpaca_without_what_is_optional(tmp_path: Path) -> None:
    bare = {"instruction": "Go.", "input": " ", "output": "Gone.", "system": None, "history": []}
    rows = rows_of(
        lines(tmp_path / "a.jsonl", bare, {"instruction": "Go.", "output": "x"}), "alpaca"
    )
    assert rows[0].messages == (Message("user", "Go."), Message("assistant", "Gone."))
    (row,) = rows_of(lines(tmp_path / "b.jsonl", ALPACA), "alpaca", separator="\n\nInput: ")
    assert row.messages[3].content == "List:\n\nInput: 3, 4"


HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}


@pytest.mark.parametrize(
    ("layout", "row", "problem"),
    [
        ("sharegpt", {"conversations": None}, "conversations is null; need a list"),
        ("sharegpt", {"conversations": []}, "conversations is empty"),
        ("sharegpt", {"conversations": "a"}, "conversations is text that is not JSON"),
        ("sharegpt", {"conversations": ["a"]}, "conversations[0] is 'a'; need an object with from"),
        (
            "sharegpt",
            {"conversations": [HUMAN, {"from": "bing", "value": "f"}]},
            "conversations[1].from is 'bing'; need one of human, user",
        ),
        ("sharegpt", {"conversations": [{"value": "a"}]}, "conversations[0].from is None; need"),
        (
            "sharegpt",
            {"conversations": [HUMAN, {"from": "gpt", "value": None}]},
            "conversations[1].value is null",
        ),
        (
            "sharegpt",
            {"conversations": [GPT, HUMAN]},
            "conversations[0].role is 'assistant'; need system or user",
        ),
        ("sharegpt", {"conversations": [HUMAN]}, "conversations[0].role is 'user'; need assistant"),
        (
            "sharegpt",
            {"conversations": [HUMAN, {**GPT, "weight": 0}]},
            "conversations[1].weight is 0; every answer is trained on",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "s"}, HUMAN, GPT], "system": "t"},
            "system is given beside a turn from system; need one of the two",
        ),
        ("sharegpt", {"conversations": [HUMAN, GPT], "system": 3}, "system is an integer; need a"),
        ("alpaca", {**ALPACA, "output": None}, "output is null"),
        ("alpaca", {**ALPACA, "instruction": ""}, "instruction is empty"),
        ("alpaca", {**ALPACA, "input": ["x"]}, "input is a list; need a string"),
        ("alpaca", {**ALPACA, "history": "x"}, "history is text that is not JSON"),
        ("alpaca", {**ALPACA, "history": [["q"]]}, "history[0] is ['q']; need a question and its"),
        ("alpaca", {**ALPACA, "history": [["q", None]]}, "history[0][1] is null"),
        (
            "messages",
            {
                "messages": [
                    *OPENAI["messages"][1:2],
                    {"role": "assistant", "content": "x", "weight": 0},
                ]
            },
            "messages[1].weight is 0; every answer is trained on; need another weight",
        ),
        (
            "messages",
            {"messages": [*OPENAI["messages"][:2], {"role": "assistant", "tool_calls": [{}]}]},
            "messages[2].tool_calls[0].name is null",
        ),
    ],
)
def test_a_row_that_breaks_the_layout_is_named(
    tmp_path: Path, layout: str, row: dict[str, Any], problem: str
) -> None:
    path = lines(tmp_path / "t.jsonl", LAYOUTS[layout], row)
    with pytest.raises(ConfigError) as error:
        rows_of(path, layout)
    assert str(error.value).startswith(f"t.jsonl:2: {problem}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["from", "value", "role", "content", "weight"]), inner)
    ),
    max_leaves=12,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"from": st.sampled_from(["human", "gpt", "tool", "system", "bing"]), "value": st.just("x")}
    ),
    max_size=5,
)
COLUMNS = st.sampled_from(["conversations", "messages", *ALPACA])


@settings(max_examples=150)
@given(st.dictionaries(COLUMNS, JSON | TURNS | TURNS.map(json.dumps)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_columns_are_a_row_or_refused(layout: str, columns: dict[str, Any]) -> None:
    source = SourceConfig(format=layout, path="t.jsonl")
    try:
        row = create_preprocessor(source, "data.sft.0").sft_row(columns)
    except RowError:
        return
    assert row.messages[-1].role == "assistant"
