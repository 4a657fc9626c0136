"""The rows of a data set, and what makes a row good.

    RL row          data_source, prompt (messages), ability, reward_model {style, ground_truth},
                    extra_info
    supervised row  messages, data_source
    preference row  prompt (messages), chosen, rejected (texts), data_source, margin

Promises: a row object that exists is valid: roles in order, no text that is null, empty, or not
Unicode, JSON values only; so nothing after this module checks a row again.
Does not promise: that the prompt fits the context, or that the answer is right.
A row that breaks a rule raises `RowError`, whose text starts with the field's path; whoever
knows the file adds the place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FOLLOWERS = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
ROLES = tuple(_FOLLOWERS)


class RowError(ValueError):
    """One row breaks the schema: `field is ...; need ...`."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


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
        prompt: messages, the last one from the user.
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
        check_roles(self.prompt, "prompt", last="user")
        _check_unicode(self.ability, "ability")
        check_text(self.reward_model.style, "reward_model.style")
        check_json(self.extra_info, "extra_info")
        check_json(self.reward_model.ground_truth, "reward_model.ground_truth")
        answer = self.reward_model.ground_truth
        if self.reward_model.style != "model" and (answer is None or answer == ""):
            shown = "null" if answer is None else "empty"
            raise RowError(f"reward_model.ground_truth is {shown}; need the answer to compare with")


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
        check_roles(self.messages, "messages", last="assistant")

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first answer."""
        roles = [message.role for message in self.messages]
        return self.messages[: roles.index("assistant")]


@dataclass(frozen=True)
class PreferenceRow:
    """Two answers to one prompt, of which one was chosen.

    Attributes:
        prompt: messages, the last one from the user.
        chosen: text of the better answer.
        rejected: text of the other one.
        data_source: names the origin.
        margin: by how much the chosen one is better, where somebody said so.
    """

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    data_source: str = "unknown"
    margin: float | None = None

    def __post_init__(self) -> None:
        check_text(self.data_source, "data_source")
        check_roles(self.prompt, "prompt", last="user")
        for name in ("chosen", "rejected"):
            check_text(getattr(self, name), name)
        check_json(self.margin, "margin")
        if self.chosen.strip() == self.rejected.strip():
            raise RowError("chosen and rejected are identical; nothing is preferred")

    @property
    def conversations(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The prompt with the chosen answer, and with the rejected one."""
        answers = (Message("assistant", text) for text in (self.chosen, self.rejected))
        chosen, rejected = ((*self.prompt, answer) for answer in answers)
        return chosen, rejected


def check_roles(messages: Sequence[Message], name: str, last: str) -> None:
    """An optional system message, then user and assistant in turn, ending with `last`.

    Between two of the assistant's messages stands what the user says or what tools returned.

    Args:
        messages: the conversation.
        name: the field's name, for errors.
        last: role of the last message.

    Raises:
        RowError: names the first message out of order.
    """
    if not messages:
        raise RowError(f"{name} is empty")
    expected = ("system", "user")
    for place, message in enumerate(messages):
        check_text(message.content, f"{name}[{place}].content")
        if message.role not in expected:
            raise RowError(
                f"{name}[{place}].role is {message.role!r}; need {' or '.join(expected)}"
            )
        expected = _FOLLOWERS[message.role]
    if messages[-1].role != last:
        raise RowError(f"{name}[{len(messages) - 1}].role is {messages[-1].role!r}; need {last}")


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


def check_json(value: object, name: str) -> None:
    """Refuse what JSON cannot hold, so that a row survives being written and read.

    Args:
        value: anything.
        name: the field's name, for errors.

    Raises:
        RowError: a type JSON has not, a number that is not finite, a key that is not a string.
    """
    if isinstance(value, str):
        _check_unicode(value, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RowError(f"{name} has the key {key!r}; need strings")
            check_json(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            check_json(item, f"{name}[{place}]")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise RowError(f"{name} is {value}; need a finite number")
    elif value is not None and not isinstance(value, bool | int):
        raise RowError(f"{name} is {type_name(value)}; need a JSON value")


def _check_unicode(text: str, name: str) -> None:
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
