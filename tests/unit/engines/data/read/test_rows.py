"""A row that exists is valid; a bad one says what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loaded_rows import write_rows

from engines.data.read.raw_rows import parse_json_list, parse_json_object, parse_messages
from engines.data.read.raw_rows import rl_row as row_of_columns
from engines.data.read.row_files import RL_FORMAT, RowFile
from engines.data.read.rows import (
    MAX_LEVELS,
    Message,
    RewardModel,
    RLRow,
    RowError,
    SFTRow,
    check_json,
    check_text,
)

USER, ASSISTANT, SYSTEM, TOOL = (
    Message(role, "x") for role in ("user", "assistant", "system", "tool")
)
RULE = RewardModel("rule", "1")


def rl_row(**changes: Any) -> RLRow:
    fields = {"data_source": "d", "prompt": (USER,), "ability": "", "reward_model": RULE}
    return RLRow(**{**fields, **changes})


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ((ASSISTANT,), "prompt[0].role is 'assistant'; need system or user"),
        ((SYSTEM, SYSTEM), "prompt[1].role is 'system'; need user"),
        ((USER, USER), "prompt[1].role is 'user'; need assistant"),
        ((USER, ASSISTANT), "prompt[1].role is 'assistant'; need user or tool"),
        ((SYSTEM,), "prompt[0].role is 'system'; need user or tool"),
        ((TOOL,), "prompt[0].role is 'tool'; need system or user"),
        ((USER, TOOL), "prompt[1].role is 'tool'; need assistant"),
        ((), "prompt is empty"),
    ],
)
def test_roles_of_a_prompt(prompt: tuple[Message, ...], problem: str) -> None:
    with pytest.raises(RowError) as error:
        rl_row(prompt=prompt)
    assert str(error.value) == problem


def test_roles_of_a_conversation() -> None:
    row = SFTRow((SYSTEM, USER, ASSISTANT, USER, ASSISTANT))
    assert row.prompt == (SYSTEM, USER)
    with pytest.raises(RowError, match=r"messages\[0\].role is 'user'; need assistant"):
        SFTRow((USER,))
    answered = RLRow("s", (USER, ASSISTANT, TOOL), "", RewardModel("rule", "1"))
    assert answered.prompt[-1] == TOOL
    SFTRow((USER, ASSISTANT, TOOL, TOOL, ASSISTANT, USER, ASSISTANT))
    with pytest.raises(RowError, match=r"messages\[3\].role is 'user'; need assistant or tool"):
        SFTRow((USER, ASSISTANT, TOOL, USER, ASSISTANT))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "p is null"),
        ("", "p is empty"),
        (" \n", "p is empty"),
        (3, "p is an integer; need a string"),
        (["a"], "p is a list; need a string"),
        ("a\x00b", "p holds NUL (U+0000) at character 2"),
        ("ab\ud800", "p holds the lone surrogate U+D800 at character 3"),
    ],
)
def test_text(content: object, problem: str) -> None:
    with pytest.raises(RowError) as error:
        check_text(content, "p")
    assert str(error.value) == problem


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "prompt is null"),
        ([], "prompt is empty"),
        (7, "prompt is an integer; need a list of messages"),
        (b"abc", "prompt is a bytes; need a list of messages"),
        (["hi"], "prompt[0] is a str; need an object with role and content"),
        ([{"content": "x"}], "prompt[0].role is None; need system, user, assistant or tool"),
        ([{"role": "function", "content": "x"}], "prompt[0].role is 'function'; need system, user"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
            "prompt[0].tool_calls[0].name is null",
        ),
        (
            [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
            "prompt[0].function_call is given; need a list, in tool_calls",
        ),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            "prompt[0].content[0] is 'audio'; need text",
        ),
        ([{"role": "user"}], "prompt[0].content is null"),
    ],
)
def test_messages_of_another_shape(value: object, problem: str) -> None:
    with pytest.raises(RowError) as error:
        parse_messages(value, "prompt")
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "turns is null; need a list"),
        ({}, "turns is an object; need a list"),
        ([], "turns is empty"),
        ("[]", "turns is empty"),
        (" ", "turns is empty"),
        ("{'a': 1}", "turns is text that is not JSON (Expecting property name"),
        ("[" * 100_000, "turns is text that is not JSON (maximum recursion"),
    ],
)
def test_lists_of_another_shape(value: object, problem: str) -> None:
    assert parse_json_list("[1]", "turns") == parse_json_list([1], "turns") == [1]
    with pytest.raises(RowError) as error:
        parse_json_list(value, "turns")
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize(("text", "reason"), [("9" * 5000, "Exceeds"), ("[" * 100_000, "maximum")])
def test_text_that_no_parser_takes_is_a_bad_row(text: str, reason: str) -> None:
    said = rf"e is text that is not JSON \({reason}"
    for parse in (parse_json_list, parse_json_object):
        with pytest.raises(RowError, match=said):
            parse(text, "e")
    model = {"ground_truth_json": text}
    with pytest.raises(RowError, match=rf"^reward_model\.ground_truth_json is text .*{reason}"):
        row_of_columns({"prompt": "q", "reward_model": model})


def test_a_string_is_one_user_message() -> None:
    assert parse_messages("hi", "prompt") == (Message("user", "hi"),)


def test_the_ground_truth_is_needed_by_a_rule_alone() -> None:
    with pytest.raises(RowError, match="ground_truth is null; need the answer"):
        rl_row(reward_model=RewardModel("rule", None))
    with pytest.raises(RowError, match="ground_truth is empty"):
        rl_row(reward_model=RewardModel("rule", ""))
    rl_row(reward_model=RewardModel("model", None))
    rl_row(reward_model=RewardModel("rule", 0))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "e is nan; need a finite number"),
        ({"a": [1, float("inf")]}, "e.a[1] is inf; need a finite number"),
        ({1: 2}, "e has the key 1; need strings"),
        ({"a": b"x"}, "e.a is a bytes; need a JSON value"),
        ({"a": "\udc00"}, "e.a holds the lone surrogate U+DC00 at character 1"),
    ],
)
def test_json_values(value: object, problem: str) -> None:
    with pytest.raises(RowError) as error:
        check_json(value, "e")
    assert str(error.value) == problem


def test_values_as_deep_as_may_be_are_written_and_read(tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(MAX_LEVELS):
        value = [value]
    row = rl_row(extra_info={"a": value[0]}, reward_model=RewardModel("rule", value))
    write_rows(tmp_path / "rl.parquet", RL_FORMAT, [row])
    assert [*RowFile(tmp_path / "rl.parquet", RL_FORMAT)] == [row]
    with pytest.raises(RowError, match=r"^extra_info\.a\[0\].* is nested deeper than 100 levels$"):
        rl_row(extra_info={"a": value})


def test_objects_come_as_such_or_as_text() -> None:
    assert parse_json_object('{"a": 1}', "e") == parse_json_object({"a": 1}, "e") == {"a": 1}
    assert parse_json_object(None, "e") == {}
    with pytest.raises(RowError, match="e is text that is not JSON"):
        parse_json_object("{", "e")
    with pytest.raises(RowError, match="e is a list; need an object"):
        parse_json_object("[1]", "e")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_any_value_is_taken_or_refused_by_name(value: Any) -> None:
    try:
        messages = parse_messages(value, "prompt")
        row = rl_row(prompt=messages, extra_info={"v": value})
    except RowError as error:
        problem = str(error)
    else:
        problem = ""
        assert json.loads(json.dumps(row.extra_info, allow_nan=False)) == row.extra_info
    assert not problem or problem.startswith(("prompt", "extra_info"))
