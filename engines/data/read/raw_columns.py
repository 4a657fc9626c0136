"""Raw columns as messages, lists and objects: the shapes that readers deliver.

Promises: a value of another shape raises `RowError` with the path of the first thing wrong in it.
Lists and objects are read from JSON text as well, for tables of text hold nothing else.
Does not promise: the order of messages; `engines.data.read.rows` checks that.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engines.data.read.rows import ROLES, Message, RowError, check_text, type_name

_BEGINS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content)['"]\s*:""")


def parse_messages(value: object, name: str) -> tuple[Message, ...]:
    """Messages of a raw row: a list of `{role, content}`, or a string for one user message.

    A string that is the JSON text of such a list is the list.

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
        if item.get("tool_calls"):
            raise RowError(f"{where}.tool_calls is given; need each call as text, in content")
        messages.append(Message(role, check_text(item.get("content"), f"{where}.content")))
    return tuple(messages)


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
