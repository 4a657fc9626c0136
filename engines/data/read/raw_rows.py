"""Make rows from raw columns in the published forms of the row schema.

Lists and objects may be JSON text, since tables of text hold nothing else. A table gives every
object the keys of all objects, with null for absent ones; so nulls are dropped from tools and from
arguments given as objects. To keep a null, give them as JSON text.

Promises: a required value that is missing or null, or any of the wrong shape, is a `RowError` with
the path of the first problem; the argument `name` or `where` is the start of that path. Reads
`ground_truth_json` of a data set's own files as a JSON value.
Does not promise: other layouts, which `engines.data.prepare.preprocessors` reads, nor the order of
messages, which `engines.data.read.rows` checks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from engines.data.read.rows import (
    ROLES,
    Image,
    Message,
    PreferenceRow,
    RewardModel,
    RLRow,
    RowError,
    SFTRow,
    ToolCall,
    check_json,
    check_text,
    type_name,
    with_images,
    with_tools,
)

_BEGINS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content)['"]\s*:""")


def parse_messages(value: object, name: str) -> tuple[Message, ...]:
    """Parse a list of `{role, content}` or its JSON text, or a string as one user message.

    Content may be a list of text parts. `tool_calls`, `tool_call_id` and `name` follow OpenAI's
    API. The order of the messages is not checked.
    """
    if value is None:
        raise RowError(f"{name} is null")
    value = messages_of_text(value, name)
    if isinstance(value, str):
        return (Message("user", check_text(value, name)),)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise RowError(f"{name} is {type_name(value)}; need a list of messages")
    if not value:
        raise RowError(f"{name} is empty")
    messages = []
    for place, item in enumerate(value):
        where = f"{name}[{place}]"
        if not isinstance(item, Mapping):
            raise RowError(f"{where} is {type_name(item)}; need an object with role and content")
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise RowError(f"{where}.role is {role!r}; need system, user, assistant or tool")
        messages.append(_message(role, item, where))
    return tuple(messages)


def _message(role: str, item: Mapping[str, Any], where: str) -> Message:
    if item.get("function_call"):
        raise RowError(f"{where}.function_call is given; need a list, in tool_calls")
    called, said = item.get("tool_calls"), item.get("content")
    calls = parse_tool_calls(called, f"{where}.tool_calls") if called else ()
    if isinstance(said, list | tuple):
        said = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(said))
    if calls and said is None:
        return Message(role, "", calls, content_is_null=True)
    content = said if calls and said == "" else check_text(said, f"{where}.content")
    if role != "tool":
        return Message(role, content, calls)
    call_id, name = (_optional(item.get(key), f"{where}.{key}") for key in ("tool_call_id", "name"))
    return Message(role, content, calls, call_id, name)


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = repr(part.get("type")) if isinstance(part, Mapping) else type_name(part)
        raise RowError(f"{where} is {kind}; need text")
    return check_text(part.get("text"), f"{where}.text")


def _optional(value: object, name: str) -> str:
    return "" if value is None or value == "" else check_text(value, name)


def parse_tool_calls(value: object, name: str) -> tuple[ToolCall, ...]:
    """Parse a list of OpenAI's `{id, type, function}` or of `{name, arguments}`, or null."""
    if value is None or value in ("", [], ()):
        return ()
    return tuple(
        _call(item, f"{name}[{place}]") for place, item in enumerate(parse_json_list(value, name))
    )


def _call(item: object, where: str) -> ToolCall:
    if not isinstance(item, Mapping):
        raise RowError(f"{where} is {type_name(item)}; need an object with name and arguments")
    if item.get("type") not in (None, "function"):
        raise RowError(f"{where}.type is {item['type']!r}; need function")
    function = item.get("function")
    called, at = (function, f"{where}.function") if isinstance(function, Mapping) else (item, where)
    arguments = called.get("arguments")
    given = parse_json_object(arguments, f"{at}.arguments")
    check_json(given, f"{at}.arguments")
    return ToolCall(
        check_text(called.get("name"), f"{at}.name"),
        json_text(given if isinstance(arguments, str) else _without_nulls(given)),
        _optional(item.get("id"), f"{where}.id"),
    )


def parse_tools(value: object, name: str) -> tuple[str, ...]:
    """Parse a list of OpenAI's `{type, function}` or of functions, or null, as `Message.tools`."""
    is_text = isinstance(value, str)
    if isinstance(value, str) and value.strip():
        value = parse_json(value, name, "need a list")
    if value is None or value in ("", [], ()):
        return ()
    tools = []
    for place, item in enumerate(parse_json_list(value, name)):
        where = f"{name}[{place}]"
        tool = parse_json_object(item, where)
        check_json(tool, where)
        tool = tool if is_text or isinstance(item, str) else _without_nulls(tool)
        if not isinstance(tool.get("function"), Mapping):
            tool = {"type": "function", "function": tool}
        if tool.get("type", "function") != "function":
            raise RowError(f"{where}.type is {tool['type']!r}; need function")
        check_text(tool["function"].get("name"), f"{where}.function.name")
        tools.append(json_text({"type": "function", **tool}))
    return tuple(tools)


def parse_images(value: object, name: str) -> tuple[Image, ...]:
    """Parse a list of `{bytes, path}`, as `datasets` stores images, or of bytes, or null."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} is {type_name(value)}; need a list")
    return tuple(_image(item, f"{name}[{place}]") for place, item in enumerate(value))


def _image(item: object, where: str) -> Image:
    if isinstance(item, Image):
        return item
    if isinstance(item, Mapping):
        item, where = item.get("bytes"), f"{where}.bytes"
    if not isinstance(item, bytes):
        raise RowError(
            f"{where} is {type_name(item)}; need the bytes of a file, embedded in the table"
        )
    return Image.of(item)


def json_text(value: object) -> str:
    """Return the JSON text as rows hold it: without white space, keys in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def messages_of_text(value: object, name: str) -> object:
    """Parse a text that is the JSON of messages; return any other value as it is.

    A list counts as messages if at least one item has a `role`. A text that begins like messages
    but is not JSON is refused: pandas writes Python's repr of lists.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        items = json.loads(value)
    except (ValueError, RecursionError) as error:
        if _BEGINS_LIKE_MESSAGES.match(value):
            raise RowError(
                f"{name} begins like a list of messages and is not JSON ({error}); need JSON text"
            ) from None
        return value
    return items if any(isinstance(item, Mapping) and "role" in item for item in items) else value


def check_one_text(value: str, name: str) -> str:
    """Return the text of one turn; refuse the JSON text of a list of messages."""
    if messages_of_text(value, name) is not value:
        raise RowError(f"{name} is a list of messages as JSON text; need the text of one turn")
    return value


def parse_json_list(value: object, name: str) -> Sequence[Any]:
    """Return a list that is not empty, given as a list or as JSON text; items are not checked."""
    if isinstance(value, str):
        value = parse_json(check_text(value, name), name, "need a list")
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} is {type_name(value)}; need a list")
    if not value:
        raise RowError(f"{name} is empty")
    return value


def parse_json_object(value: object, name: str) -> dict[str, Any]:
    """Return a new dict from an object, its JSON text or null (empty); values are not checked."""
    if isinstance(value, str):
        value = parse_json(value, name, "need an object")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"{name} is {type_name(value)}; need an object")
    return dict(value)


def parse_json(text: str, name: str, need: str) -> Any:
    """Parse the JSON text of a cell; errors end with `need`, what the field has to hold."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name} is text that is not JSON ({error}); {need}") from None


def check_weight(turn: Mapping[str, Any], role: str, where: str) -> None:
    """Refuse an assistant message with `weight` 0, since every answer is trained on."""
    if role == "assistant" and turn.get("weight") == 0:
        raise RowError(f"{where}.weight is 0; every answer is trained on; need another weight")


def rl_row(columns: Mapping[str, Any]) -> RLRow:
    """Make an RL row from the columns `prompt` and `reward_model`, and optional ones."""
    ability = columns.get("ability")
    return RLRow(
        data_source=columns.get("data_source", "unknown"),
        prompt=_with_extras(parse_messages(columns.get("prompt"), "prompt"), columns),
        ability="" if ability is None else ability,
        reward_model=_reward_model(columns.get("reward_model")),
        extra_info=parse_json_object(columns.get("extra_info"), "extra_info"),
    )


def sft_row(columns: Mapping[str, Any]) -> SFTRow:
    """Make a supervised row from `messages` (a list or its JSON text) and optional columns."""
    messages = parse_json_list(columns.get("messages"), "messages")
    parsed = parse_messages(messages, "messages")
    for place, (turn, message) in enumerate(zip(messages, parsed, strict=True)):
        check_weight(turn, message.role, f"messages[{place}]")
    return SFTRow(_with_extras(parsed, columns), columns.get("data_source", "unknown"))


def preference_row(columns: Mapping[str, Any]) -> PreferenceRow:
    """Make a pair from `chosen`, `rejected` and optional columns.

    An answer is a text, a list with one assistant message, or a whole conversation that ends with
    it; lists may be JSON text. The prompt is the rest of the conversations, which must be equal and
    agree with `prompt` (a text repeats one message); without conversations it is `prompt`.
    """
    chosen_prompt, chosen = _answer(columns.get("chosen"), "chosen")
    rejected_prompt, rejected = _answer(columns.get("rejected"), "rejected")
    if chosen_prompt != rejected_prompt:
        raise RowError("chosen and rejected answer different prompts; need one that both answer")
    asked = messages_of_text(columns.get("prompt"), "prompt")
    if asked is not None:
        given = parse_messages(asked, "prompt")
        # A text `prompt` may repeat one message of the conversation.
        repeats = isinstance(asked, str) and given[0] in chosen_prompt
        if chosen_prompt and given != chosen_prompt and not repeats:
            raise RowError("chosen answers another prompt than the column prompt; need the same")
        chosen_prompt = chosen_prompt or given
    if not chosen_prompt:
        raise RowError("prompt is null, and chosen is no conversation that holds it")
    return PreferenceRow(
        _with_extras(chosen_prompt, columns),
        chosen.content_or_null,
        rejected.content_or_null,
        columns.get("data_source") or "unknown",
        parse_margin(columns.get("margin")),
        chosen.tool_calls,
        rejected.tool_calls,
    )


def parse_margin(value: object) -> float | None:
    """Return the margin as a number; null gives None."""
    return None if value is None else parse_number(value, "margin", "a number or null")


def parse_number(value: object, name: str, need: str = "a number") -> float:
    """Return the number in a column as a float; errors end with `need`."""
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):
            return float(value)
    raise RowError(f"{name} is {value!r:.40}; need {need}")


def _with_extras(messages: Sequence[Message], columns: Mapping[str, Any]) -> tuple[Message, ...]:
    if not columns.get("tools") and not columns.get("images"):  # an empty cell is none
        return tuple(messages)
    offered = with_tools(messages, parse_tools(columns.get("tools"), "tools"))
    return with_images(offered, parse_images(columns.get("images"), "images"))


def _answer(value: object, name: str) -> tuple[tuple[Message, ...], Message]:
    """Return the messages before the answer, empty if only the answer is given, and the answer."""
    value = messages_of_text(value, name)
    if value is None or isinstance(value, str):
        return (), Message("assistant", check_text(value, name))
    messages = parse_messages(value, name)
    if messages[-1].role != "assistant":
        raise RowError(f"{name} ends with the {messages[-1].role}'s message; need the assistant's")
    return messages[:-1], messages[-1]


def _reward_model(value: object) -> RewardModel:
    columns = parse_json_object(value, "reward_model")
    if not columns:
        raise RowError("reward_model is null; need style and ground_truth")
    answer = columns.get("ground_truth")
    if answer is None and columns.get("ground_truth_json") is not None:
        name = "reward_model.ground_truth_json"
        answer = parse_json(check_text(columns["ground_truth_json"], name), name, "need a value")
    style = columns.get("style")
    return RewardModel("rule" if style is None else check_text(style, "reward_model.style"), answer)
