"""Conversations with tools: text, ids and loss masks, against transformers and by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from loaded_rows import write_rows

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read import chat
from engines.data.read.chat import DEFAULT_CHAT_TEMPLATE, render, render_prompts, render_sft
from engines.data.read.examples import as_policy
from engines.data.read.raw_rows import preference_row, rl_row, sft_row
from engines.data.read.row_files import PREFERENCE_FORMAT, SFT_FORMAT, RowFile
from engines.data.read.rows import Message, SFTRow, ToolCall, said_beside
from engines.data.read.tokenizer import TOOL_TEMPLATE, DirectoryTokenizer
from infra.errors import ConfigError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Ü"}}


def call(name: str, arguments: dict[str, Any], id: str = "") -> dict[str, Any]:
    """As OpenAI's API has it, but for the arguments, which templates need as an object."""
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": id, **made} if id else made


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain in Bern & Köln?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            call("weather", {"days": 2, "city": "Bern"}, "c1"),
            call("weather", {"city": "Köln"}, "c2"),
        ],
    },
    {"role": "tool", "content": '{"rain": true}', "tool_call_id": "c1", "name": "weather"},
    {"role": "tool", "content": "no", "tool_call_id": "c2"},
    {"role": "assistant", "content": "Bern only."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "", "tool_calls": [call("clock", {})]},
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon."},
]
ROW = {"messages": MESSAGES, "tools": [WEATHER, CLOCK]}
ANSWERS = [
    'I look.\n<call>{"name": "weather", "arguments": {"days": 2, "city": "Bern"}}</call>'
    '\n<call>{"name": "weather", "arguments": {"city": "Köln"}}</call><|end|>',
    "Bern only.<|end|>",
    '\n<call>{"name": "clock", "arguments": {}}</call><|end|>',
    "Noon.<|end|>",
]
CHATML = """\
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|system|>' + messages[0]['content'] + '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- generation %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<call>{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|user|>' }}
        {%- endif %}
        {{- '\\n<returned>' + message.content + '</returned>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""As Qwen2.5's: tools in the system turn, what they returned in one turn of the user's."""
PYTHONIC = """\
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}
    {{- '<|system|>' }}{%- for t in tools %}{{- t | tojson(indent=2) }}{%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {{- '<|assistant|>' }}
        {%- generation %}
        {{- m.content }}
        {%- for c in m.tool_calls %}
            {{- c.function.name + '(' }}
            {%- for key, value in c.function.arguments | items %}
                {{- key + '=' + value | string + ';' }}
            {%- endfor %}
            {{- ')' + (c.id if 'id' in c else '?') }}
        {%- endfor %}
        {{- '<|end|>' }}
        {%- endgeneration %}
    {%- elif m.role == 'tool' %}
        {{- '<|user|>' + (m.name | default('?')) + (m.tool_call_id | default('?')) + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>' }}{%- generation %}{{- m.content + '<|end|>' }}{%- endgeneration %}
    {%- else %}
        {{- '<|' + m.role + '|>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""Asks which keys are there, and writes ids and names."""
TEMPLATES = {"chatml": CHATML, "pythonic": PYTHONIC}


NULL_TOLD = """\
{%- for m in messages %}
    {%- if m['role'] == 'assistant' and m['content'] is none %}
        {{- '<|assistant|>' }}
        {%- generation %}
        {%- for c in m['tool_calls'] %}
            {{- '<call>' + c['function']['name'] + '\\n' + c['function']['arguments'] + '</call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
        {%- endgeneration %}
    {%- elif m['role'] == 'assistant' %}
        {{- '<|assistant|>' }}{%- generation %}{{- m['content'] + '<|end|>' }}{%- endgeneration %}
    {%- else %}
        {{- '<|user|>' + m['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""As DeepSeek's: calls are written where the content is null, their arguments appended as text."""
SILENT = [
    MESSAGES[1],
    {"role": "assistant", "content": None, "tool_calls": [call("weather", {"city": "Köln"})]},
    {"role": "tool", "content": "no"},
    {"role": "assistant", "tool_calls": [call("clock", {}), call("weather", {"days": 2})]},
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon."},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    texts = [json.dumps(ROW, ensure_ascii=False), CHATML, PYTHONIC]
    return train_tokenizer(TokenizerConfig(), texts, path, max_length=4096)


def trained_runs(tokenizer: DirectoryTokenizer, messages: tuple[Message, ...]) -> list[str]:
    rendered = render_sft(tokenizer, messages)
    runs: list[list[int]] = [[]]
    for token, trained in zip(rendered.input_ids, rendered.loss_mask, strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_only_what_the_assistant_says_and_calls_is_trained_on(directory: Path) -> None:
    tokenizer = DirectoryTokenizer.load(directory, CHATML)
    messages = sft_row(ROW).messages
    assert trained_runs(tokenizer, messages) == ANSWERS
    # Without the template's own marks: found by rendering up to each answer.
    unmarked = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    assert trained_runs(DirectoryTokenizer.load(directory, unmarked), messages) == ANSWERS
    whole = tokenizer.decode(render_sft(tokenizer, messages).input_ids)
    returned = '<|user|>\n<returned>{"rain": true}</returned>\n<returned>no</returned><|end|>'
    assert returned in whole
    assert whole.startswith("<|system|>Be brief.\n\n<tools>\n" + json.dumps(WEATHER) + "\n{")


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [ROW["tools"], None])
def test_transformers_makes_the_same_of_them(
    directory: Path, tmp_path: Path, name: str, tools: list[Any] | None
) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    ours, theirs = DirectoryTokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    row = sft_row({**ROW, "tools": tools})
    expected = theirs.apply_chat_template(
        MESSAGES, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    rendered = render_sft(ours, row.messages)
    assert list(rendered.input_ids) == expected["input_ids"]
    assert list(rendered.loss_mask) == expected["assistant_masks"]
    assert sum(rendered.loss_mask) > 80
    assert render_sft(theirs, row.messages) == rendered
    for end in (2, 5, 7, 9):
        prompt = theirs.apply_chat_template(
            MESSAGES[:end], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert list(render_prompts(ours, [row.messages[:end]])[0]) == prompt


@pytest.mark.slow
def test_a_template_of_its_own_for_tools(directory: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    plain = DEFAULT_CHAT_TEMPLATE
    for form in ("files", "config"):
        path = tmp_path / form
        shutil.copytree(directory, path)
        theirs = AutoTokenizer.from_pretrained(path)
        theirs.chat_template = {"default": plain, "tool_use": CHATML}
        (path / "chat_template.jinja").unlink()
        theirs.save_pretrained(path, save_jinja_files=form == "files")
        assert (path / TOOL_TEMPLATE).exists() == (form == "files")
        ours, theirs = DirectoryTokenizer.load(path), AutoTokenizer.from_pretrained(path)
        for tools in (ROW["tools"], None):
            chat = MESSAGES if tools else [MESSAGES[1], MESSAGES[5]]
            row = sft_row({"messages": chat, "tools": tools})
            expected = theirs.apply_chat_template(chat, tools=tools, return_dict=False)
            assert list(render_sft(ours, row.messages).input_ids) == expected
            assert render_sft(theirs, row.messages).input_ids == tuple(expected)
    assert DirectoryTokenizer.load(path, plain).chat_template == plain


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (CHATML.replace("if tools", "if false"), "the tools that are offered; need one .* tools;"),
        (CHATML.replace("in message.tool_calls", "in []"), "what the assistant calls; need"),
        (CHATML.replace("== 'tool'", "== 'x'"), "what a tool returned; need one that writes mess"),
    ],
)
def test_a_template_that_drops_a_part_is_refused(directory: Path, template: str, lost: str) -> None:
    messages = sft_row(ROW).messages
    tokenizer = DirectoryTokenizer.load(directory, template)
    with pytest.raises(ConfigError, match=rf"model\.chat_template: leaves out {lost}"):
        render_sft(tokenizer, messages)
    with pytest.raises(ConfigError, match=rf"model\.chat_template: leaves out {lost}"):
        render_prompts(tokenizer, [messages[:9]])
    plain = (messages[1], Message("assistant", "x"))
    assert trained_runs(tokenizer, plain) == ["x<|end|>"]


def test_template_that_rejects_partial_messages_still_renders(directory: Path) -> None:
    """As Mistral's, which wants turns to alternate but for calls and what they returned."""
    turns = (
        "{%- set ns = namespace(place=0) %}{%- for m in messages %}"
        "{%- if not (m.role in ['system', 'tool'] or m.tool_calls is defined) %}"
        "{%- if (m.role == 'user') != (ns.place % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{%- endif %}{%- set ns.place = ns.place + 1 %}{%- endif %}{%- endfor %}"
    )
    messages = sft_row(ROW).messages
    tokenizer = DirectoryTokenizer.load(directory, turns + CHATML)
    assert trained_runs(tokenizer, messages) == ANSWERS
    assert render_prompts(tokenizer, [messages[:9]])[0]


def test_template_omissions_are_checked_once_per_conversation(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = DirectoryTokenizer.load(directory, CHATML)
    made: list[int] = []
    monkeypatch.setattr(
        chat, "render", lambda *given, **named: (made.append(1), render(*given, **named))[1]
    )
    render_sft(tokenizer, sft_row(ROW).messages)
    assert len(made) == 2 * len(ANSWERS) + 3, "twice for each answer, and without each of 3 parts"


def test_calls_without_a_text_are_told_by_null(directory: Path, tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer.load(directory, NULL_TOLD)
    row = sft_row({"messages": SILENT})
    write_rows(tmp_path / "sft.parquet", SFT_FORMAT, [row])
    assert [*RowFile(tmp_path / "sft.parquet", SFT_FORMAT)] == [row]
    assert trained_runs(tokenizer, row.messages) == [
        '<call>weather\n{"city":"Köln"}</call><|end|>',
        '<call>clock\n{}</call><call>weather\n{"days":2}</call><|end|>',
        "Noon.<|end|>",
    ]
    spoken = [{**each, "content": each.get("content") or ""} for each in SILENT]
    other = sft_row({"messages": spoken})
    assert other != row
    with pytest.raises(ConfigError, match="leaves out what the assistant calls"):
        render_sft(tokenizer, other.messages)


@pytest.mark.parametrize(
    "written",
    ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content + '' }}", "{{ m.content.strip() }}",
     "{% if m.content %}{{ m.content }}{% endif %}"],
)  # fmt: skip
def test_templates_that_know_no_null_write_nothing_for_it(directory: Path, written: str) -> None:
    calls = "{% for c in m.tool_calls %}{{ c.function.name + (c.function | tojson) }}{% endfor %}"
    template = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{written}{calls}{{% endfor %}}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer = DirectoryTokenizer.load(directory, template)
    asked = {**SILENT[0], "content": "None?"}
    null, spoken = (
        sft_row({"messages": [asked, {**SILENT[1], "content": content}]}).messages
        for content in (None, "")
    )
    assert render_sft(tokenizer, null) == render_sft(tokenizer, spoken)
    whole = tokenizer.decode(render_sft(tokenizer, null).input_ids)
    assert whole.startswith("<|user|>None?<|assistant|>weather{")


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_makes_the_same_of_null(directory: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    ours, theirs = DirectoryTokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        SILENT, return_dict=True, return_assistant_tokens_mask=True
    )
    rendered = render_sft(ours, sft_row({"messages": SILENT}).messages)
    assert list(rendered.input_ids) == expected["input_ids"]
    assert list(rendered.loss_mask) == expected["assistant_masks"]


@pytest.mark.slow
def test_transformers_writes_the_same_for_null() -> None:
    """Its renderer: its tokenizers leave null out before, on which such templates fail."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = sft_row({"messages": SILENT}).messages
    given = [
        {
            "role": message.role,
            "content": None if message.content_is_null else message.content,
            "tool_calls": [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ],
        }
        for message in messages
    ]
    (expected,), _ = render_jinja_template(conversations=[given], chat_template=NULL_TOLD)
    assert render(NULL_TOLD, messages).text == expected


def test_prompts_that_end_with_what_a_tool_returned(directory: Path) -> None:
    tokenizer = DirectoryTokenizer.load(directory, CHATML)
    row = rl_row({"prompt": MESSAGES[:5], "tools": ROW["tools"], "reward_model": {
        "ground_truth": "Bern only."}})  # fmt: skip
    (ids,) = render_prompts(tokenizer, [row.prompt])
    text = tokenizer.decode(ids)
    assert text.endswith("<returned>no</returned><|end|>\n<|assistant|>")
    whole = tokenizer.decode(render_sft(tokenizer, sft_row(ROW).messages).input_ids)
    assert whole.startswith(text)


def test_pairs_of_calls(directory: Path, tmp_path: Path) -> None:
    tokenizer = DirectoryTokenizer.load(directory, CHATML)
    good = {"role": "assistant", "content": None, "tool_calls": [call("clock", {})]}
    row = preference_row(
        {
            "prompt": MESSAGES[:2],
            "chosen": [good],
            "rejected": [{"role": "assistant", "content": "Rain."}],
            "tools": ROW["tools"],
        }
    )
    assert (row.chosen, row.answers[0].content_is_null) == (None, True)
    write_rows(tmp_path / "pairs.parquet", PREFERENCE_FORMAT, [row])
    assert [*RowFile(tmp_path / "pairs.parquet", PREFERENCE_FORMAT)] == [row]
    texts = [
        tokenizer.decode([i for i, m in zip(each.input_ids, each.loss_mask, strict=True) if m])
        for each in as_policy([row], tokenizer)
    ]
    assert texts == [ANSWERS[2], "Rain.<|end|>"]
    whole = tokenizer.decode(as_policy([row], tokenizer)[0].input_ids)
    assert whole.startswith("<|system|>Be brief.\n\n<tools>")


def test_what_templates_are_given() -> None:
    template = "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents is none }}"
    row = SFTRow((Message("user", "q"), Message("assistant", "", (ToolCall("f", '{"b":1}'),))))
    assert render(template, row.messages).text == (
        '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": '
        '[{"type": "function", "function": {"name": "f", "arguments": {"b": 1}}}]}]|null|True'
    )
    null = (row.messages[0], said_beside(None, row.messages[1].tool_calls))
    assert render("{{ messages[1] | tojson }}", null).text.startswith('{"role": "assistant", "tool')
