"""Raw columns as rows: the forms of the row schema that people publish.

Promises: a row of another shape raises `RowError` with the path of the first thing wrong in it;
`ground_truth_json` of a data set's files is read as the JSON value that it stands for.
Does not promise: other layouts; `engines.data.prepare.preprocessors` reads those.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from engines.data.read.raw_columns import (
    check_weight,
    messages_of_text,
    parse_images,
    parse_json,
    parse_json_list,
    parse_json_object,
    parse_messages,
    parse_tools,
)
from engines.data.read.rows import (
    Message,
    PreferenceRow,
    RewardModel,
    RLRow,
    RowError,
    SFTRow,
    check_text,
    with_images,
    with_tools,
)


def rl_row(columns: Mapping[str, Any]) -> RLRow:
    """A row of the row schema from its raw columns.

    Args:
        columns: `prompt` and `reward_model` are needed; `data_source`, `ability`,
            `extra_info`, `tools` and `images` have defaults.

    Returns:
        The valid row.

    Raises:
        RowError: a column is missing, null or of the wrong shape.
    """
    ability = columns.get("ability")
    return RLRow(
        data_source=check_text(columns.get("data_source", "unknown"), "data_source"),
        prompt=_with_extras(parse_messages(columns.get("prompt"), "prompt"), columns),
        ability="" if ability is None else ability,
        reward_model=_reward_model(columns.get("reward_model")),
        extra_info=parse_json_object(columns.get("extra_info"), "extra_info"),
    )


def sft_row(columns: Mapping[str, Any]) -> SFTRow:
    """A supervised row from its raw columns.

    Args:
        columns: `messages` is needed, a list or its JSON text; `data_source` and `tools` have
            defaults.

    Returns:
        The valid row.

    Raises:
        RowError: a column is missing, null or of the wrong shape.
    """
    messages = parse_json_list(columns.get("messages"), "messages")
    parsed = parse_messages(messages, "messages")
    for place, (turn, message) in enumerate(zip(messages, parsed, strict=True)):
        check_weight(turn, message.role, f"messages[{place}]")
    return SFTRow(
        _with_extras(parsed, columns),
        check_text(columns.get("data_source", "unknown"), "data_source"),
    )


def preference_row(columns: Mapping[str, Any]) -> PreferenceRow:
    """A pair from its raw columns, in the forms that people publish.

    An answer is a text, a list of one message of the assistant, or a whole conversation that ends
    with it; lists may be JSON text. Without a column `prompt`, or with one that is a text, the
    conversations say what was answered; they may differ in their last message only.

    Args:
        columns: `chosen` and `rejected` are needed; `prompt`, `data_source`, `margin` and `tools`
            may be absent.

    Returns:
        The valid row.

    Raises:
        RowError: a column is missing, null or of the wrong shape, or the answers are to different
            prompts.
    """
    chosen_prompt, chosen = _answer(columns.get("chosen"), "chosen")
    rejected_prompt, rejected = _answer(columns.get("rejected"), "rejected")
    if chosen_prompt != rejected_prompt:
        raise RowError("chosen and rejected answer different prompts; need one that both answer")
    prompt = chosen_prompt
    asked = messages_of_text(columns.get("prompt"), "prompt")
    if asked is not None:
        given = parse_messages(asked, "prompt")
        # Beside a conversation a text repeats one of its questions.
        repeats = isinstance(asked, str) and given[0] in prompt
        if prompt and given != prompt and not repeats:
            raise RowError("chosen answers another prompt than the column prompt; need the same")
        prompt = prompt or given
    if not prompt:
        raise RowError("prompt is null, and chosen is no conversation that holds it")
    return PreferenceRow(
        _with_extras(prompt, columns),
        chosen.content_or_null,
        rejected.content_or_null,
        check_text(columns.get("data_source") or "unknown", "data_source"),
        parse_margin(columns.get("margin")),
        chosen.tool_calls,
        rejected.tool_calls,
    )


def parse_margin(value: object) -> float | None:
    """By how much an answer is better.

    Args:
        value: of the column; null says nothing of it.

    Returns:
        The number, or None.

    Raises:
        RowError: it is of another type.
    """
    return None if value is None else parse_number(value, "margin", "a number or null")


def parse_number(value: object, name: str, need: str = "a number") -> float:
    """The value of a column that holds numbers.

    Args:
        value: of the raw column.
        name: of the column, for errors.
        need: what has to stand there, for errors.

    Returns:
        The value.

    Raises:
        RowError: it is no number, or one that is too large.
    """
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):
            return float(value)
    raise RowError(f"{name} is {value!r:.40}; need {need}")


def _with_extras(messages: Sequence[Message], columns: Mapping[str, Any]) -> tuple[Message, ...]:
    """Messages with the tools and the images of their row."""
    if not columns.get("tools") and not columns.get("images"):
        return tuple(messages)
    offered = with_tools(messages, parse_tools(columns.get("tools"), "tools"))
    return with_images(offered, parse_images(columns.get("images"), "images"))


def _answer(value: object, name: str) -> tuple[tuple[Message, ...], Message]:
    """The messages before an answer, none where only the answer is given, and the answer."""
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
