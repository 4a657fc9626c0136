"""Rows with tools in the layouts that people publish: one meaning, from files to the artifact."""

import json
from pathlib import Path
from typing import Any

import loaded_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaded_rows import write_rows

from engines.config.data import DataConfig, SourceConfig
from engines.data.prepare.dataset import build_dataset
from engines.data.read.dataset import load_dataset
from engines.data.read.row_files import PREFERENCE_FORMAT, SFT_FORMAT, RowFile
from engines.data.read.rows import Message, PreferenceRow, SFTRow, ToolCall, said_beside
from infra.errors import ConfigError

WEATHER = {
    "name": "weather",
    "description": "Says it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"name": "clock", "description": "Ü", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, CLOCK)]
AS_ROWS_HOLD_THEM = tuple(
    json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in TOOLS
)
CHAT = (
    Message("user", "Rain in Köln?", tools=AS_ROWS_HOLD_THEM),
    said_beside(None, (ToolCall("weather", '{"city":"Köln"}'),)),
    Message("tool", '{"rain": true}'),
    Message("assistant", "Yes."),
)
CALL = {"name": "weather", "arguments": {"city": "Köln"}}
OPENAI = {
    "messages": [
        {"role": "user", "content": "Rain in Köln?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "weather", "arguments": json.dumps(CALL["arguments"])},
                }
            ],
        },
        {"role": "tool", "content": '{"rain": true}'},
        {"role": "assistant", "content": "Yes."},
    ],
    "tools": TOOLS,
}
GLAIVE = {
    "conversations": [
        {"from": "human", "value": "Rain in Köln?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"rain": true}'},
        {"from": "gpt", "value": "Yes."},
    ],
    "tools": json.dumps([WEATHER, CLOCK]),
}
HERMES = {
    "id": "a",
    "conversations": [
        {"from": "system", "value": f"You call. <tools> {json.dumps(TOOLS)} </tools>"},
        {"from": "human", "value": "Rain in Köln?"},
        {"from": "gpt", "value": f"<tool_call>\n{CALL}\n</tool_call>"},
        {"from": "tool", "value": '<tool_response>\n{"rain": true}\n</tool_response>\n'},
        {"from": "gpt", "value": "Yes."},
    ],
    "tools": json.dumps(TOOLS),
    "category": "Weather",
}
XLAM = {
    "id": 7,
    "query": "Rain in Köln?",
    "answers": json.dumps([CALL, {"name": "clock", "arguments": {}}]),
    "tools": json.dumps(
        [{**each, "parameters": each["parameters"]["properties"]} for each in (WEATHER, CLOCK)]
    ),
}
Rows = tuple[str, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Rows] = [
    ("messages", OPENAI, {}),
    ("messages", {**OPENAI, "tools": json.dumps(TOOLS)}, {}),
    ("messages", {**OPENAI, "tools": [WEATHER, CLOCK]}, {}),
    ("sharegpt", GLAIVE, {}),
    ("sharegpt", HERMES, {"parse_calls": True}),
]


def write(path: Path, row: dict[str, Any]) -> Path:
    """A file of one row, in the form that its suffix says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


def rows_of(path: Path, layout: str, split: str = "sft", **options: Any) -> Any:
    source = SourceConfig(format=layout, path=str(path), options=options)
    return loaded_rows.load(split, source).rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("layout", "row", "options"), LAYOUTS)
def test_one_conversation_in_every_layout(
    tmp_path: Path, layout: str, row: dict[str, Any], options: dict[str, Any], suffix: str
) -> None:
    (read,) = rows_of(write(tmp_path / f"t{suffix}", row), layout, **options)
    assert read.messages == CHAT
    if not options:
        assert rows_of(tmp_path / f"t{suffix}", "auto") == (read,)


def test_what_a_table_adds_to_objects_is_no_value(tmp_path: Path) -> None:
    """Parquet gives both calls the arguments of both, and each function the keys of all."""
    calls = [CALL, {"name": "clock", "arguments": {"zone": "CET"}}]
    tools = [TOOLS[0], {"type": "function", "function": {"name": "clock"}}]
    row = {**OPENAI, "tools": tools}
    row["messages"] = [dict(each) for each in OPENAI["messages"]]
    row["messages"][1]["tool_calls"] = calls
    (read,) = rows_of(write(tmp_path / "t.parquet", row), "messages")
    stored = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]
    assert stored["messages"][1]["tool_calls"][1]["arguments"] == {"city": None, "zone": "CET"}
    assert read.messages[1].tool_calls == (
        ToolCall("weather", '{"city":"Köln"}'),
        ToolCall("clock", '{"zone":"CET"}'),
    )
    assert json.loads(read.messages[0].tools[1]) == tools[1]
    assert (read,) == rows_of(write(tmp_path / "t.jsonl", row), "messages")


def test_nulls_in_json_text_are_meant(tmp_path: Path) -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}
    calls = [{"name": "f", "arguments": '{"a": null}'}]
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ],
        "tools": json.dumps([tool]),
    }
    (read,) = rows_of(write(tmp_path / "t.jsonl", row), "messages")
    assert read.messages[1].tool_calls == (ToolCall("f", '{"a":null}'),)
    assert '{"default":null}' in read.messages[0].tools[0]


def test_hermes_stays_text_where_nobody_asks(tmp_path: Path) -> None:
    """Its system message tells the tools, so the column does not tell them again."""
    (read,) = rows_of(write(tmp_path / "t.jsonl", HERMES), "sharegpt")
    assert [m.content for m in read.messages] == [t["value"] for t in HERMES["conversations"]]
    assert all(message.is_plain for message in read.messages)


@pytest.mark.parametrize("tools", [None, "", "[]"])
def test_tools_that_stand_in_the_text_alone_are_not_lost(tmp_path: Path, tools: str | None) -> None:
    """Who reads calls leaves out that text, so a column has to offer what is called."""
    path = write(tmp_path / "t.jsonl", {**HERMES, "tools": tools})
    with pytest.raises(ConfigError, match="t.jsonl:1: tools is empty; need the tools that the sys"):
        rows_of(path, "sharegpt", parse_calls=True)
    (read,) = rows_of(path, "sharegpt")
    assert "<tools>" in read.messages[0].content


def test_several_calls_and_responses_of_hermes(tmp_path: Path) -> None:
    one, two = '{"name": "a", "arguments": {"s": "it\'s"}}', "{'name': 'b', 'arguments': {}}"
    said = f"Both.\n<tool_call>\n{one}\n</tool_call>\n<tool_call>{two}</tool_call>"
    returned = "<tool_response>1</tool_response>\n<tool_response>\n2\n</tool_response>"
    turns = [("human", "q"), ("gpt", said), ("tool", returned), ("gpt", "3")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    (read,) = rows_of(write(tmp_path / "t.jsonl", row), "sharegpt", parse_calls=True)
    assert read.messages == (
        Message("user", "q"),
        Message("assistant", "Both.", (ToolCall("a", '{"s":"it\'s"}'), ToolCall("b", "{}"))),
        Message("tool", "1"),
        Message("tool", "2"),
        Message("assistant", "3"),
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_xlam(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"t{suffix}", XLAM)
    (sft,), (rl,) = rows_of(path, "auto"), rows_of(path, "auto", "rl")
    calls = (ToolCall("weather", '{"city":"Köln"}'), ToolCall("clock", "{}"))
    assert sft.messages == (CHAT[0], said_beside(None, calls))
    assert rl.prompt == (CHAT[0],)
    assert rl.reward_model.ground_truth == [CALL, {"name": "clock", "arguments": {}}]


def test_xlam_with_whole_schemas(tmp_path: Path) -> None:
    """A property may be called `type` all the same."""
    typed = {"name": "f", "parameters": {"type": {"type": "str"}}}
    for tools, expected in (([WEATHER, CLOCK], CHAT[0].tools), ([typed], None)):
        (row,) = rows_of(write(tmp_path / "t.jsonl", {**XLAM, "tools": json.dumps(tools)}), "xlam")
        if expected:
            assert row.messages[0].tools == expected
        else:
            (tool,) = map(json.loads, row.messages[0].tools)
            given = {"type": "object", "properties": typed["parameters"]}
            assert tool["function"]["parameters"] == given


def test_the_artifact_has_the_columns_of_openai(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", OPENAI)
    pair = {
        "prompt": OPENAI["messages"][:1],
        "chosen": OPENAI["messages"][1:2],
        "rejected": [{"role": "assistant", "content": "No."}],
        "tools": TOOLS,
    }
    pairs = write(tmp_path / "p.jsonl", pair)
    rl = write(tmp_path / "x.jsonl", XLAM)
    data = DataConfig(
        sft=(SourceConfig(path=str(path)),),
        preference=(SourceConfig(path=str(pairs)),),
        rl=(SourceConfig(path=str(rl)),),
        allow_overlap=True,
    )
    build_dataset(data, None, 0, tmp_path / "out")
    dataset = load_dataset(tmp_path / "out")
    (stored,) = pq.read_table(tmp_path / "out" / "sft.parquet").to_pylist()
    assert stored["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": None,
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Köln"}'},
            }
        ],
        "tool_call_id": None,
        "name": None,
    }
    assert json.loads(stored["tools"]) == TOOLS
    (row,) = dataset.sft_rows()
    assert row.messages == CHAT
    (row,) = dataset.rl_rows()
    assert row.prompt == (CHAT[0],)
    (row,) = dataset.preference_rows()
    assert row.conversations == (CHAT[:2], (CHAT[0], Message("assistant", "No.")))
    # What the artifact holds is a source again.
    assert rows_of(tmp_path / "out" / "sft.parquet", "messages")[0].messages == CHAT


def test_rows_without_tools_have_the_columns_they_had(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path / "t.jsonl", {"messages": chat, "tools": []})
    data = DataConfig(sft=(SourceConfig(path=str(path), limit=1),))
    build_dataset(data, None, 0, tmp_path / "out")
    (stored,) = pq.read_table(tmp_path / "out" / "sft.parquet").to_pylist()
    assert stored == {"messages": chat, "data_source": "unknown"}


def test_prompts_that_differ_in_a_call_are_two(tmp_path: Path) -> None:
    def row(city: str) -> dict[str, Any]:
        called = {**OPENAI["messages"][1], "tool_calls": [{"name": "f", "arguments": {"c": city}}]}
        prompt = [OPENAI["messages"][0], called, OPENAI["messages"][2]]
        return {"prompt": prompt, "reward_model": {"ground_truth": "x"}}

    sources = []
    for name, city in (("train", "Bern"), ("eval", "Köln"), ("same", "Bern")):
        path = write(tmp_path / f"{name}.jsonl", row(city))
        sources.append((SourceConfig(path=str(path)),))
    summary = build_dataset(
        DataConfig(rl=sources[0], evaluation=sources[1]), None, 0, tmp_path / "out"
    )
    assert summary.num_overlapping == 0
    with pytest.raises(ConfigError, match="1 eval prompt occurs in train"):
        build_dataset(DataConfig(rl=sources[0], evaluation=sources[2]), None, 0, tmp_path / "no")


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4)
words = texts.filter(str.strip)
arguments = st.dictionaries(texts, st.none() | st.integers() | texts, max_size=2).map(
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
)
calls = st.lists(st.builds(ToolCall, words, arguments, words | st.just("")), max_size=2).map(tuple)
tools = st.lists(
    words.map(
        lambda name: json.dumps(
            {"type": "function", "function": {"name": name}},
            ensure_ascii=False,
            separators=(",", ":"),
        )
    ),
    max_size=2,
).map(tuple)
called = st.tuples(texts, calls).filter(
    lambda pair: bool(pair[0].strip() or (pair[1] and not pair[0]))
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.tuples(tools, called, words, words | st.just(""), called), max_size=3))
def test_rows_come_back_equal(tmp_path: Path, drawn: list[Any]) -> None:
    rows, pairs = [], []
    for offered, first, returned, id, last in drawn:
        prompt = (
            Message("user", "q", tools=offered),
            Message("assistant", *first),
            Message("tool", returned, (), id, id),
        )
        rows.append(SFTRow((*prompt, Message("assistant", *last)), "s"))
        said = [Message("assistant", *answer).said.strip() for answer in (first, last)]
        if said[0] != said[1]:
            answers = {"chosen_calls": first[1], "rejected_calls": last[1]}
            pairs.append(PreferenceRow(prompt, first[0], last[0], **answers))
    write_rows(tmp_path / "sft.parquet", SFT_FORMAT, rows)
    assert tuple(RowFile(tmp_path / "sft.parquet", SFT_FORMAT)) == tuple(rows)
    write_rows(tmp_path / "pairs.parquet", PREFERENCE_FORMAT, pairs)
    assert tuple(RowFile(tmp_path / "pairs.parquet", PREFERENCE_FORMAT)) == tuple(pairs)


def openai(**changed: Any) -> dict[str, Any]:
    """The row, its call changed."""
    given = {"name": "f", "arguments": {}, **changed}
    answer = {"role": "assistant", "content": "", "tool_calls": [given]}
    return {"messages": [OPENAI["messages"][0], answer], "tools": TOOLS}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("layout", "row", "problem"),
    [
        ("messages", openai(name=""), "messages[1].tool_calls[0].name is empty"),
        (
            "messages",
            openai(type="code"),
            "messages[1].tool_calls[0].type is 'code'; need function",
        ),
        (
            "messages",
            openai(arguments="{a}"),
            "messages[1].tool_calls[0].arguments is text that is not JSON",
        ),
        (
            "messages",
            openai(arguments=[1]),
            "messages[1].tool_calls[0].arguments is a list; need an object",
        ),
        (
            "messages",
            openai(arguments='{"a": NaN}'),
            "messages[1].tool_calls[0].arguments.a is nan; need a finite number",
        ),
        ("messages", {**OPENAI, "tools": "x"}, "tools is text that is not JSON"),
        ("messages", {**OPENAI, "tools": {"a": 1}}, "tools is an object; need a list"),
        ("messages", {**OPENAI, "tools": [3]}, "tools[0] is an integer; need an object"),
        ("messages", {**OPENAI, "tools": [{}]}, "tools[0].function.name is null"),
        (
            "messages",
            {**OPENAI, "tools": [{"type": "web_search", "function": WEATHER}]},
            "tools[0].type is 'web_search'; need function",
        ),
        (
            "messages",
            {"messages": [{**OPENAI["messages"][0], "tool_calls": [CALL]}]},
            "messages[0].tool_calls is given; need role assistant for it",
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    GLAIVE["conversations"][0],
                    {"from": "function_call", "value": "f"},
                ]
            },
            "conversations[1].value is text that is not JSON",
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    GLAIVE["conversations"][0],
                    {"from": "function_call", "value": "{[1]: 2}"},
                ]
            },
            "conversations[1].value is text that is not JSON",
        ),
        *(
            (
                "messages",
                {**OPENAI, "tools": [made(levels)]},
                "tools[0]" + 16 * ".a" + " is nested deeper than 100 levels",
            )
            for levels in (101, 800)
            for made in (nested, lambda levels: json.dumps(nested(levels)))
        ),
        ("xlam", {**XLAM, "answers": "[]"}, "answers is empty"),
        ("xlam", {**XLAM, "tools": "[]"}, "tools is empty"),
        ("xlam", {**XLAM, "query": ""}, "query is empty"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, layout: str, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        rows_of(write(tmp_path / "t.jsonl", row), layout)
    assert str(error.value).startswith(f"t.jsonl:1: {problem}")
