"""ShareGPT rows: `conversations`, a list of turns with `from` and `value`; supervised.

`from` is `human`, `gpt`, `system`, `function_call` (JSON text of `{name, arguments}` or a list of
them), or `tool` or `observation` (a tool's result). `user`, `assistant`, `role` and `content` are
read as well, since both notations occur. A column `system` holds the system message if no turn
does. A column `tools` holds the tools, which the chat template writes; it is ignored if a system
message with `<tools>` already lists them. Every answer is trained on.
Sources: `data/README.md` of LLaMA-Factory (columns, roles, `system`, `tools`), Open-Orca/SlimOrca
(`weight`), NousResearch/hermes-function-calling-v1 (`tool` and the tags in `<>`).
"""

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns, optional_text
from engines.data.read.raw_rows import (
    check_weight,
    parse_json,
    parse_json_list,
    parse_tool_calls,
    parse_tools,
)
from engines.data.read.rows import (
    Message,
    RowError,
    SFTRow,
    check_roles,
    check_text,
    said_beside,
    with_tools,
)

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_TELLS_TOOLS = "<tools>"
_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"\s*<tool_response>(.*?)</tool_response>\s*", re.DOTALL)


class ShareGPTOptions(StrictModel):
    """Options: the `data_source` of its rows, and how calls are handled."""

    data_source: str = "sharegpt"
    parse_calls: bool = False
    """Parse `<tool_call>` in answers and `<tool_response>` in tool results, and replace a system
    message that has `<tools>` by the column `tools`; the chat template writes all of them in the
    model's own form. If false, they remain text."""


class ShareGPT(Preprocessor[ShareGPTOptions]):
    """Reads conversations of several turns."""

    sft_columns = ("conversations",)

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Make messages of the turns; an empty system message is dropped."""
        turns = parse_json_list(columns.get("conversations"), "conversations")
        parsed = [_message(turn, f"conversations[{place}]") for place, turn in enumerate(turns)]
        messages = tuple(message for message in parsed if message is not None)
        check_roles(messages, "conversations", last=("assistant",))
        system = optional_text(columns.get("system"), "system")
        if system:
            if messages[0].role == "system":
                raise RowError("system is given beside a turn from system; need one of the two")
            messages = (Message("system", system), *messages)
        tells = messages[0].role == "system" and _TELLS_TOOLS in messages[0].content
        if self.options.parse_calls:
            messages = _with_calls(messages[1:] if tells else messages)
        if self.options.parse_calls or not tells:
            tools = parse_tools(columns.get("tools"), "tools")
            if tells and not tools:
                raise RowError(
                    "tools is empty; need the tools that the system message lists in <tools>, "
                    "because parse_calls removes that message"
                )
            messages = with_tools(messages, tools)
        return SFTRow(messages, self.options.data_source)


def _message(turn: object, where: str) -> Message | None:
    """Return a turn as a message; None for a system message without text."""
    if not isinstance(turn, Mapping):
        raise RowError(f"{where} is {turn!r:.40}; need an object with from and value")
    # A table gives every turn the keys of all turns, with null for absent ones.
    other = turn.get("from") is None and turn.get("role") is not None
    by, said = ("role", "content") if other else ("from", "value")
    who = turn.get(by)
    role = _ROLES.get(who) if isinstance(who, str) else None
    if role is None:
        raise RowError(f"{where}.{by} is {who!r}; need one of {', '.join(_ROLES)}")
    if role == "system" and optional_text(turn.get(said), f"{where}.{said}") is None:
        return None
    check_weight(turn, role, where)
    text = check_text(turn.get(said), f"{where}.{said}")
    return (
        _called(None, [text], f"{where}.{said}") if who == "function_call" else Message(role, text)
    )


def _called(content: str | None, texts: Sequence[str], where: str) -> Message:
    """Return an answer with the calls in `texts`, each the JSON of one call or of a list."""
    calls: list[Any] = []
    for text in texts:
        value = _parsed(text, where)
        calls += value if isinstance(value, list) else [value]
    return said_beside(content, parse_tool_calls(calls, where))


def _parsed(text: str, where: str) -> object:
    """Parse JSON or, as Hermes writes many calls, a Python literal."""
    try:
        return parse_json(text, where, "need name and arguments")
    except RowError:
        # TypeError: an unhashable key or set member.
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return ast.literal_eval(text.strip())
        raise


def _with_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Parse the tags in messages; several tool responses in a message become several messages."""
    read: list[Message] = []
    for place, message in enumerate(messages):
        if message.role == "assistant" and (texts := _CALL.findall(message.content)):
            content = _CALL.sub("", message.content).strip()
            read.append(_called(content or None, texts, f"<tool_call> of message {place}"))
        elif message.role == "tool" and _RESPONSE.sub("", message.content) == "":
            texts = _RESPONSE.findall(message.content)
            read += [replace(message, content=text.strip()) for text in texts]
        else:
            read.append(message)
    return tuple(read)
