"""The rows of a data set, and what makes a row good.

    RL row          data_source, prompt (messages), ability, reward_model {style, ground_truth},
                    extra_info
    supervised row  messages, data_source
    preference row  prompt (messages), chosen, rejected (answers), data_source, margin

The tools that a conversation offers stand with its first message, so whoever passes messages on
passes them too.
Promises: a row object that exists is valid: roles in order, no text that is null, empty, or not
Unicode, JSON values only; so nothing after this module checks a row again.
Does not promise: that the prompt fits the context, or that the answer is right.
A row that breaks a rule raises `RowError`, whose text starts with the field's path; whoever
knows the file adds the place.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

_FOLLOWERS = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
ROLES = tuple(_FOLLOWERS)
IMAGE_MARK = "<image>"
"""Where an image stands in the text of a message."""
_LETTERS = str.maketrans("0123456789", "ghijklmnop")
MAX_LEVELS = 100
"""Of JSON values: readers and writers of JSON have limits of their own, and name no row."""
PROMPT_ENDS = ("user", "tool")
"""Roles that an answer follows."""


class RowError(ValueError):
    """One row breaks the schema: `field is ...; need ...`."""


@dataclass(frozen=True)
class ToolCall:
    """A function that the assistant asks for.

    Attributes:
        name: of the function.
        arguments: JSON text of an object; its keys in the order in which they were given.
        id: by which a message of the role `tool` refers to it; empty: none.
    """

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class Image:
    """An image that a message shows; equal ones have equal bytes.

    Attributes:
        sha256: of its bytes, in hex.
        data: the bytes, as a source has them; None: the images of the data set hold them.
    """

    sha256: str
    data: bytes | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(data: bytes) -> "Image":
        """The image of these bytes."""
        return Image(hashlib.sha256(data).hexdigest(), data)

    @property
    def word(self) -> str:
        """The digest in letters alone: one word, which no other image has."""
        return self.sha256.translate(_LETTERS)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: text; of the assistant it may be empty beside calls.
        tool_calls: of the assistant.
        tool_call_id: of the role `tool`, the call that it answers; empty where nobody says.
        name: of the role `tool`, the function that returned; likewise.
        tools: of the first message alone: what the assistant may call in this conversation. Each
            is the JSON text of `{type: function, function: {name, description, parameters}}`.
        images: of the user, one for each `IMAGE_MARK` in the content, in their order; without
            images the mark is text.
        content_is_null: the source has no content, or null, beside calls; it is empty here, and
            templates are told.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    tools: tuple[str, ...] = ()
    images: tuple[Image, ...] = ()
    content_is_null: bool = False

    @property
    def content_or_null(self) -> str | None:
        """The content; None where the source has none."""
        return None if self.content_is_null else self.content

    @property
    def is_plain(self) -> bool:
        """Whether role and content say all."""
        return not (self.tool_calls or self.tool_call_id or self.name or self.tools or self.images)

    @property
    def said(self) -> str:
        """Content, calls and images as one text: equal only where all of them are."""
        if not self.tool_calls and not self.images:
            return self.content
        if not self.images:
            calls = (f"\n{call.name}{call.arguments}" for call in self.tool_calls)
            return "".join((self.content, *calls))
        first, *others = self.content.split(IMAGE_MARK)
        shown = zip(self.images, others, strict=True)
        return "".join((first, *(f" {image.word} {text}" for image, text in shown)))


def said_beside(content: str | None, calls: tuple[ToolCall, ...]) -> Message:
    """What the assistant says, None where the source has nothing, and calls."""
    return Message("assistant", content or "", calls, content_is_null=content is None)


def with_tools(messages: Sequence[Message], tools: tuple[str, ...]) -> tuple[Message, ...]:
    """A conversation in which the assistant may call tools.

    Args:
        messages: at least one.
        tools: as `Message.tools` has them; empty: none.

    Returns:
        The same messages, the first with the tools.
    """
    first, *others = messages
    return (replace(first, tools=tools), *others) if tools else tuple(messages)


def with_images(messages: Sequence[Message], images: Sequence[Image]) -> tuple[Message, ...]:
    """A conversation that shows images.

    Args:
        messages: with as many `IMAGE_MARK` in what the user says.
        images: in the order of the marks; none: the marks are text.

    Returns:
        The same messages, each with its images.

    Raises:
        RowError: there are more marks, or fewer.
    """
    if not images:
        return tuple(messages)
    counts = [m.content.count(IMAGE_MARK) if m.role == "user" else 0 for m in messages]
    if sum(counts) != len(images):
        raise RowError(
            f"{len(images)} images are given for {sum(counts)} {IMAGE_MARK}; need one each"
        )
    ends = accumulate(counts)
    return tuple(
        replace(message, images=tuple(images[end - count : end])) if count else message
        for message, count, end in zip(messages, counts, ends, strict=True)
    )


@dataclass(frozen=True)
class RewardModel:
    """How a completion is judged.

    Attributes:
        style: `rule` (a function compares with `ground_truth`) or `model` (a model judges).
        ground_truth: what the reward function gets; any JSON value, None only for `model`.
    """

    style: str
    ground_truth: Any


@dataclass(frozen=True)
class RLRow:
    """One prompt with what is needed to judge its completions.

    Attributes:
        data_source: names the origin; evaluation reports accuracy per source.
        prompt: messages, the last one from the user or of a tool.
        ability: a free label.
        reward_model: style and ground truth.
        extra_info: JSON object, handed to the reward function.
    """

    data_source: str
    prompt: tuple[Message, ...]
    ability: str
    reward_model: RewardModel
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text(self.data_source, "data_source")
        check_roles(self.prompt, "prompt", last=PROMPT_ENDS)
        _check_unicode(self.ability, "ability")
        check_text(self.reward_model.style, "reward_model.style")
        check_json(self.extra_info, "extra_info")
        check_json(self.reward_model.ground_truth, "reward_model.ground_truth")
        answer = self.reward_model.ground_truth
        if self.reward_model.style != "model" and (answer is None or answer == ""):
            shown = "null" if answer is None else "empty"
            raise RowError(f"reward_model.ground_truth is {shown}; need the answer to compare with")

    @property
    def images(self) -> tuple[Image, ...]:
        """Those of the prompt, in their order."""
        return tuple(image for message in self.prompt for image in message.images)


@dataclass(frozen=True)
class SFTRow:
    """One conversation to imitate.

    Attributes:
        messages: the last one from the assistant.
        data_source: names the origin.
    """

    messages: tuple[Message, ...]
    data_source: str = "unknown"

    def __post_init__(self) -> None:
        check_text(self.data_source, "data_source")
        check_roles(self.messages, "messages", last=("assistant",))
        _refuse_images(self.messages)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first answer."""
        roles = [message.role for message in self.messages]
        return self.messages[: roles.index("assistant")]


@dataclass(frozen=True)
class PreferenceRow:
    """Two answers to one prompt, of which one was chosen.

    Attributes:
        prompt: messages, the last one from the user or of a tool.
        chosen: text of the better answer; empty, or None where the source has none, only beside
            its calls.
        rejected: text of the other one; likewise.
        data_source: names the origin.
        margin: by how much the chosen one is better, where somebody said so.
        chosen_calls: what the better answer calls.
        rejected_calls: what the other one calls.
    """

    prompt: tuple[Message, ...]
    chosen: str | None
    rejected: str | None
    data_source: str = "unknown"
    margin: float | None = None
    chosen_calls: tuple[ToolCall, ...] = ()
    rejected_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        check_text(self.data_source, "data_source")
        check_roles(self.prompt, "prompt", last=PROMPT_ENDS)
        _refuse_images(self.prompt)
        for name, answer in zip(("chosen", "rejected"), self.answers, strict=True):
            _check_said(answer, name, name)
        check_json(self.margin, "margin")
        chosen, rejected = (answer.said.strip() for answer in self.answers)
        if chosen == rejected:
            raise RowError("chosen and rejected are identical; nothing is preferred")

    @property
    def answers(self) -> tuple[Message, Message]:
        """The chosen answer and the rejected one."""
        return (
            said_beside(self.chosen, self.chosen_calls),
            said_beside(self.rejected, self.rejected_calls),
        )

    @property
    def conversations(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The prompt with the chosen answer, and with the rejected one."""
        chosen, rejected = ((*self.prompt, answer) for answer in self.answers)
        return chosen, rejected


def prompt_of(pair: PreferenceRow) -> RLRow:
    """What both answers of a pair answer, for a model to judge what the policy says to it."""
    return RLRow(pair.data_source, pair.prompt, "chat", RewardModel("model", None))


def check_roles(messages: Sequence[Message], name: str, last: Sequence[str]) -> None:
    """An optional system message, then user and assistant in turn, ending with one of `last`.

    Between two of the assistant's messages stands what the user says or what tools returned.

    Args:
        messages: the conversation.
        name: the field's name, for errors.
        last: roles of which the last message has one.

    Raises:
        RowError: names the first message out of order.
    """
    if not messages:
        raise RowError(f"{name} is empty")
    expected = ("system", "user")
    for place, message in enumerate(messages):
        where = f"{name}[{place}]"
        _check_said(message, where, f"{where}.content")
        if message.role not in expected:
            raise RowError(f"{where}.role is {message.role!r}; need {' or '.join(expected)}")
        if message.tools and place:
            raise RowError(f"{where}.tools is given; need it with the first message alone")
        expected = _FOLLOWERS[message.role]
    if messages[-1].role not in last:
        raise RowError(
            f"{name}[{len(messages) - 1}].role is {messages[-1].role!r}; need {' or '.join(last)}"
        )


def _check_said(message: Message, where: str, content: str) -> None:
    """What a message says and calls, without its place among others."""
    if message.content or not message.tool_calls:
        check_text(message.content_or_null, content)
    if message.is_plain:
        return
    if message.tool_calls and message.role != "assistant":
        raise RowError(f"{where}.tool_calls is given; need it of the assistant alone")
    if message.images and message.role != "user":
        raise RowError(f"{where}.images is given; need it of the user alone")
    if message.images and message.content.count(IMAGE_MARK) != len(message.images):
        raise RowError(f"{where}.images are {len(message.images)}; need one for each {IMAGE_MARK}")
    if (message.tool_call_id or message.name) and message.role != "tool":
        named = "tool_call_id" if message.tool_call_id else "name"
        raise RowError(f"{where}.{named} is given; need it of the role tool alone")
    _check_unicode(message.tool_call_id, f"{where}.tool_call_id")
    _check_unicode(message.name, f"{where}.name")
    for place, call in enumerate(message.tool_calls):
        at = f"{where}.tool_calls[{place}]"
        check_text(call.name, f"{at}.name")
        _check_unicode(call.id, f"{at}.id")
        _check_object(call.arguments, f"{at}.arguments")
    for place, tool in enumerate(message.tools):
        _check_object(tool, f"{where}.tools[{place}]")


def _refuse_images(messages: Sequence[Message]) -> None:
    if any(message.images for message in messages):
        raise RowError("images are given; need text: rows of data.rl and data.evaluation have some")


def _check_object(text: str, name: str) -> None:
    """JSON text of an object."""
    try:
        value = json.loads(check_text(text, name))
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name} is text that is not JSON ({error}); need an object") from None
    if not isinstance(value, dict):
        raise RowError(f"{name} is {type_name(value)}; need an object")
    check_json(value, name)


def check_text(value: object, name: str) -> str:
    """The value, if it is non-blank Unicode text without NUL.

    Args:
        value: anything.
        name: the field's name, for errors.

    Returns:
        The value as it is.

    Raises:
        RowError: it is anything else.
    """
    if value is None:
        raise RowError(f"{name} is null")
    if not isinstance(value, str):
        raise RowError(f"{name} is {type_name(value)}; need a string")
    if not value.strip():
        raise RowError(f"{name} is empty")
    _check_unicode(value, name)
    return value


def check_json(value: object, name: str, levels: int = MAX_LEVELS) -> None:
    """Refuse what JSON cannot hold, so that a row survives being written and read.

    Args:
        value: anything.
        name: the field's name, for errors.
        levels: of lists and objects in each other that there may be.

    Raises:
        RowError: a type JSON has not, a number that is not finite, a key that is not a string, or
            more levels.
    """
    if not levels and isinstance(value, Mapping | list | tuple):
        raise RowError(f"{name:.40} is nested deeper than {MAX_LEVELS} levels")
    if isinstance(value, str):
        _check_unicode(value, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RowError(f"{name} has the key {key!r}; need strings")
            check_json(item, f"{name}.{key}", levels - 1)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            check_json(item, f"{name}[{place}]", levels - 1)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise RowError(f"{name} is {value}; need a finite number")
    elif value is not None and not isinstance(value, bool | int):
        raise RowError(f"{name} is {type_name(value)}; need a JSON value")


def _check_unicode(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise RowError(f"{name} is {type_name(text)}; need a string")
    if "\x00" in text:
        raise RowError(f"{name} holds NUL (U+0000) at character {text.index(chr(0)) + 1}")
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            f"{name} holds the lone surrogate U+{ord(text[error.start]):04X} "
            f"at character {error.start + 1}"
        ) from None


def type_name(value: object) -> str:
    """What JSON calls the type of a value, for errors."""
    names = {dict: "an object", list: "a list", bool: "a boolean", int: "an integer"}
    return names.get(type(value), f"a {type(value).__name__}")
