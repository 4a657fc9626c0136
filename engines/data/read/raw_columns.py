"""Raw columns as messages, lists and objects: the shapes that readers deliver.

Promises: a value of another shape raises `RowError` with the path of the first thing wrong in it.
Lists and objects are read from JSON text as well, for tables of text hold nothing else.
A table gives every object the keys of all, null where it has none: in tools and in arguments that
are objects a null is no value. Where null is meant, they are given as JSON text.
Does not promise: the order of messages; `engines.data.read.rows` checks that.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engines.data.read.rows import (
    ROLES,
    Image,
    Message,
    RowError,
    ToolCall,
    check_json,
    check_text,
    type_name,
)

_BEGINS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content)['"]\s*:""")


def parse_messages(value: object, name: str) -> tuple[Message, ...]:
    """Messages of a raw row: a list of `{role, content}`, or a string for one user message.

    A string that is the JSON text of such a list is the list. Content may be parts of text.
    `tool_calls`, `tool_call_id` and `name` are those of OpenAI's API.

    Args:
        value: as a reader delivers it.
        name: the field's name, for errors.

    Returns:
        At least one message; their order is not checked here.

    Raises:
        RowError: another type, an unknown role, or content that is not text.
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
    """The text of a part of a message."""
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = repr(part.get("type")) if isinstance(part, Mapping) else type_name(part)
        raise RowError(f"{where} is {kind}; need text")
    return check_text(part.get("text"), f"{where}.text")


def _optional(value: object, name: str) -> str:
    return "" if value is None or value == "" else check_text(value, name)


def parse_tool_calls(value: object, name: str) -> tuple[ToolCall, ...]:
    """Calls of an answer: of OpenAI's API (`{id, type, function}`), or bare `{name, arguments}`.

    Args:
        value: a list of them, its JSON text, or null; arguments are an object or its JSON text.
        name: the field's name, for errors.

    Returns:
        In their order.

    Raises:
        RowError: another type, a call without a name, or arguments that are no object.
    """
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
    if isinstance(function, Mapping):
        where, called = f"{where}.function", function
    else:
        called = item
    arguments = called.get("arguments")
    given = parse_json_object(arguments, f"{where}.arguments")
    check_json(given, f"{where}.arguments")
    return ToolCall(
        check_text(called.get("name"), f"{where}.name"),
        json_text(given if isinstance(arguments, str) else _without_nulls(given)),
        _optional(item.get("id"), f"{where}.id"),
    )


def parse_tools(value: object, name: str) -> tuple[str, ...]:
    """Tools of a conversation: of OpenAI's API (`{type, function}`), or bare functions.

    Args:
        value: a list of them, its JSON text, or null; each is an object or its JSON text.
        name: the field's name, for errors.

    Returns:
        As `Message.tools` has them; none where the list is empty.

    Raises:
        RowError: another type, or a function without a name.
    """
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
    """Images of a raw row: `{bytes, path}`, as `datasets` stores them, or bytes.

    Args:
        value: a list of them, or null.
        name: the field's name, for errors.

    Returns:
        In their order.

    Raises:
        RowError: another type, or a path alone.
    """
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
        shown = "null" if item is None else type_name(item)
        raise RowError(f"{where} is {shown}; need the bytes of a file, embedded in the table")
    return Image.of(item)


def json_text(value: object) -> str:
    """JSON as rows hold it: without white space, keys in their order.

    Args:
        value: that `check_json` takes.

    Returns:
        The text.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def messages_of_text(value: object, name: str) -> object:
    """The list where a text is the JSON of messages, as in a table of text; else the value.

    Args:
        value: of a column that may hold a text or messages.
        name: the field's name, for errors.

    Returns:
        A list of which at least one item has a `role`, or the value as it is.

    Raises:
        RowError: it begins like a list of messages and is no JSON: pandas writes lists so.
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
    """Refuse the JSON text of messages where one text stands for a turn.

    Args:
        value: the text.
        name: the field's name, for errors.

    Returns:
        The value as it is.

    Raises:
        RowError: it is such JSON text.
    """
    if messages_of_text(value, name) is not value:
        raise RowError(f"{name} is a list of messages as JSON text; need the text of one turn")
    return value


def parse_json_list(value: object, name: str) -> Sequence[Any]:
    """A list given as such or, as in a table of text, as JSON text.

    Args:
        value: anything.
        name: the field's name, for errors.

    Returns:
        At least one item; none is checked here.

    Raises:
        RowError: it is neither, or empty.
    """
    if isinstance(value, str):
        value = parse_json(check_text(value, name), name, "need a list")
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} is {'null' if value is None else type_name(value)}; need a list")
    if not value:
        raise RowError(f"{name} is empty")
    return value


def parse_json_object(value: object, name: str) -> dict[str, Any]:
    """An object given as such or as JSON text; null is the empty object.

    Args:
        value: anything.
        name: the field's name, for errors.

    Returns:
        A new mapping; its values are not checked here.

    Raises:
        RowError: it is neither.
    """
    if isinstance(value, str):
        value = parse_json(value, name, "need an object")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"{name} is {type_name(value)}; need an object")
    return dict(value)


def parse_json(text: str, name: str, need: str) -> Any:
    """The value that JSON text stands for.

    Args:
        text: a cell of a table.
        name: the field's name, for errors.
        need: what has to stand there, for errors.

    Returns:
        Any JSON value.

    Raises:
        RowError: it is no JSON, is nested too deeply, or holds a number of too many digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name} is text that is not JSON ({error}); {need}") from None


def check_weight(turn: Mapping[str, Any], role: str, where: str) -> None:
    """Refuse an answer that its row says not to train on: nothing here can leave one out.

    Args:
        turn: the raw message.
        role: its role.
        where: its place, for errors.

    Raises:
        RowError: it is the assistant's, and its `weight` is 0.
    """
    if role == "assistant" and turn.get("weight") == 0:
        raise RowError(f"{where}.weight is 0; every answer is trained on; need another weight")
