"""Make rows from raw columns in the published forms of the row schema.

Promises: every function raises `RowError` if a column is missing, null or of the wrong shape, with
the path of the first problem. Reads `ground_truth_json` of a data set's own files as a JSON value.
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
    """Make an RL row from the columns `prompt` and `reward_model`, and optional ones."""
    ability = columns.get("ability")
    return RLRow(
        data_source=check_text(columns.get("data_source", "unknown"), "data_source"),
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
    return SFTRow(
        _with_extras(parsed, columns),
        check_text(columns.get("data_source", "unknown"), "data_source"),
    )


def preference_row(columns: Mapping[str, Any]) -> PreferenceRow:
    """Make a pair from `chosen`, `rejected` and optional columns.

    An answer is a text, a list with one assistant message, or a whole conversation that ends with
    it; lists may be JSON text. If `prompt` is absent or a text, the prompt comes from the
    conversations, which may differ only in their last message.
    """
    chosen_prompt, chosen = _answer(columns.get("chosen"), "chosen")
    rejected_prompt, rejected = _answer(columns.get("rejected"), "rejected")
    if chosen_prompt != rejected_prompt:
        raise RowError("chosen and rejected answer different prompts; need one that both answer")
    prompt = chosen_prompt
    asked = messages_of_text(columns.get("prompt"), "prompt")
    if asked is not None:
        given = parse_messages(asked, "prompt")
        # A text `prompt` may repeat one message of the conversation.
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
    """Return the margin as a number; null gives None."""
    return None if value is None else parse_number(value, "margin", "a number or null")


def parse_number(value: object, name: str, need: str = "a number") -> float:
    """Return the number in a column as a float; errors end with `need`."""
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):
            return float(value)
    raise RowError(f"{name} is {value!r:.40}; need {need}")


def _with_extras(messages: Sequence[Message], columns: Mapping[str, Any]) -> tuple[Message, ...]:
    if not columns.get("tools") and not columns.get("images"):
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
