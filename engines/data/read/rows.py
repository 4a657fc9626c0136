"""The rows of a data set and the rules that make them valid.

    RL row          data_source, prompt (messages), ability, reward_model {style, ground_truth},
                    extra_info
    supervised row  messages, data_source
    preference row  prompt (messages), chosen, rejected (answers), data_source, margin

Promises: every existing row object is valid: roles in order, required texts not blank, all text
Unicode, JSON values only. Later modules rely on that. A row that breaks a rule raises `RowError`,
whose text names the field; callers add file and row number.
Does not promise: that the prompt fits the context, or that the answer is right.
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
_ROLE_OF = {"tool_calls": "assistant", "images": "user", "tool_call_id": "tool", "name": "tool"}
"""By field of a message, the only role that may have it."""
IMAGE_MARK = "<image>"
"""Placeholder of an image in the text of a message."""
_LETTERS = str.maketrans("0123456789", "ghijklmnop")
MAX_LEVELS = 100
"""Deepest nesting of JSON values. JSON libraries have limits too, but their errors name no row."""
PROMPT_ENDS = ("user", "tool")
"""Roles of the last message of a prompt."""


class RowError(ValueError):
    """One row breaks the schema: `field is ...; need ...`."""


@dataclass(frozen=True)
class ToolCall:
    """A function call of the assistant; `arguments` is JSON text of an object."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class Image:
    """An image in a message; images with equal digests are equal.

    `data` is the encoded file, or None if the image store of the data set holds it.
    """

    sha256: str
    data: bytes | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(data: bytes) -> "Image":
        """Return the image with these encoded bytes."""
        return Image(hashlib.sha256(data).hexdigest(), data)

    @property
    def word(self) -> str:
        """The digest in letters only: a single word that is unique to the image."""
        return self.sha256.translate(_LETTERS)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: text; may be empty for an assistant that has tool calls.
        tool_call_id: role `tool` only: id of the call that it answers; empty if unknown.
        name: role `tool` only: the function that returned; empty if unknown.
        tools: first message only: the tools of the whole conversation, each the JSON text of
            `{type: function, function: {name, description, parameters}}`.
        images: role `user` only: one for each `IMAGE_MARK` in the content. Without images the mark
            is plain text.
        content_is_null: the source has null or no content beside tool calls. `content` is empty
            then; chat templates get the difference.
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
        """True if the message has only a role and content."""
        return not (self.tool_calls or self.tool_call_id or self.name or self.tools or self.images)

    @property
    def said(self) -> str:
        """Content, calls and images as one text, which differs if any of them does."""
        if not self.images:
            return self.content + "".join(
                f"\n{each.name}{each.arguments}" for each in self.tool_calls
            )
        first, *others = self.content.split(IMAGE_MARK)
        shown = zip(self.images, others, strict=True)
        return first + "".join(f" {image.word} {text}" for image, text in shown)


def said_beside(content: str | None, calls: tuple[ToolCall, ...]) -> Message:
    """Return an assistant message with calls; `content` None means that the source has none."""
    return Message("assistant", content or "", calls, content_is_null=content is None)


def with_tools(messages: Sequence[Message], tools: tuple[str, ...]) -> tuple[Message, ...]:
    """Return the messages with `tools` (see `Message.tools`) in the first one."""
    first, *others = messages
    return (replace(first, tools=tools), *others) if tools else tuple(messages)


def with_images(messages: Sequence[Message], images: Sequence[Image]) -> tuple[Message, ...]:
    """Assign `images` to the marks of the user's messages; `RowError` unless there is one for each.

    Without images, the marks remain text.
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
    """How a completion is judged: verl's column `reward_model`, not a model.

    `style` is `model` (a judge scores; the ground truth may be None) or another, such as `rule` (a
    function compares with `ground_truth`, any JSON value).
    """

    style: str
    ground_truth: Any


@dataclass(frozen=True)
class RLRow:
    """One prompt with what is needed to judge its completions.

    Evaluation reports accuracy per `data_source`. `extra_info` is passed to the reward function.
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
            raise RowError(
                f"reward_model.ground_truth is {'null' if answer is None else 'empty'}; need the "
                "answer to compare with"
            )

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages of the row."""
        return self.prompt

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of the prompt, in order."""
        return tuple(image for message in self.prompt for image in message.images)


@dataclass(frozen=True)
class SFTRow:
    """One conversation to train on; the last message is the assistant's."""

    messages: tuple[Message, ...]
    data_source: str = "unknown"

    def __post_init__(self) -> None:
        check_text(self.data_source, "data_source")
        check_roles(self.messages, "messages", last=("assistant",))
        _refuse_images(self.messages)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first answer."""
        return self.messages[: [message.role for message in self.messages].index("assistant")]


@dataclass(frozen=True)
class PreferenceRow:
    """A chosen and a rejected answer to one prompt.

    Only an answer with tool calls may have an empty text, or None if the source has none.
    `margin` is how much better the chosen answer is; None if unknown.
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
        """The chosen and the rejected answer as messages."""
        return (
            said_beside(self.chosen, self.chosen_calls),
            said_beside(self.rejected, self.rejected_calls),
        )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt and both answers."""
        return (*self.prompt, *self.answers)

    @property
    def conversations(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The prompt with the chosen answer, and the prompt with the rejected one."""
        chosen, rejected = ((*self.prompt, answer) for answer in self.answers)
        return chosen, rejected


def check_roles(messages: Sequence[Message], name: str, last: Sequence[str]) -> None:
    """Check the order of roles: an optional system message, then user and assistant in turn.

    Instead of a user message, tool results may stand between two assistant messages.

    Raises:
        RowError: a message is out of order, or the last role is not one of `last`.
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
            raise RowError(f"{where}.tools is given; need it only in the first message")
        expected = _FOLLOWERS[message.role]
    if messages[-1].role not in last:
        raise RowError(
            f"{name}[{len(messages) - 1}].role is {messages[-1].role!r}; need {' or '.join(last)}"
        )


def _check_said(message: Message, where: str, content: str) -> None:
    if message.content or not message.tool_calls:
        check_text(message.content_or_null, content)
    if message.is_plain:
        return
    for name, role in _ROLE_OF.items():
        if getattr(message, name) and message.role != role:
            raise RowError(f"{where}.{name} is given; need role {role} for it")
    if message.images and message.content.count(IMAGE_MARK) != len(message.images):
        raise RowError(f"{where} has {len(message.images)} images; need one for each {IMAGE_MARK}")
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
        raise RowError("images are given; need text; only data.rl and data.evaluation read images")


def _check_object(text: str, name: str) -> None:
    try:
        value = json.loads(check_text(text, name))
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name} is text that is not JSON ({error}); need an object") from None
    if not isinstance(value, dict):
        raise RowError(f"{name} is {type_name(value)}; need an object")
    check_json(value, name)


def check_text(value: object, name: str) -> str:
    """Return the value if it is non-blank Unicode text without NUL, else raise `RowError`."""
    if not isinstance(value, str):
        need = "" if value is None else "; need a string"
        raise RowError(f"{name} is {type_name(value)}{need}")
    if not value.strip():
        raise RowError(f"{name} is empty")
    _check_unicode(value, name)
    return value


def check_json(value: object, name: str, levels: int = MAX_LEVELS) -> None:
    """Refuse what JSON cannot represent, so that a row survives a round trip.

    Raises:
        RowError: a type outside JSON, a float that is not finite, a key that is not a string, or
            more than `levels` nested lists and objects.
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
    """Return a name of the value's type, for errors."""
    names = {dict: "an object", list: "a list", bool: "a boolean", int: "an integer"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
