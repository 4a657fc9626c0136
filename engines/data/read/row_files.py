"""Rows as parquet columns, the layout of a dataset artifact.

    rl.parquet, eval.parquet   data_source string, prompt list<struct<role, content>>,
                               ability string, reward_model struct<style, ground_truth,
                               ground_truth_json>, extra_info string (a JSON object)
    sft.parquet                messages list<struct<role, content>>, data_source string
    preference.parquet, preference_eval.parquet
                               prompt list<struct<role, content>>, chosen string, rejected string,
                               data_source string, margin double

A ground truth that is text stands in `ground_truth`; any other JSON value stands as JSON text in
`ground_truth_json`. `extra_info` is read as a struct as well, as other tools write it.
Promises: what is written is read back equal; equal rows give equal bytes (nothing in the file
speaks of time, host or path) for one version of pyarrow, whose name the format records.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engines.data.read.raw_columns import (
    check_weight,
    messages_of_text,
    parse_json,
    parse_json_list,
    parse_json_object,
    parse_messages,
)
from engines.data.read.rows import (
    Message,
    PreferenceRow,
    RewardModel,
    RLRow,
    RowError,
    SFTRow,
    check_text,
)
from infra.errors import ConfigError

_ROW_GROUP_ROWS = 65_536
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_RL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        (
            "reward_model",
            pa.struct(
                [
                    ("style", pa.string()),
                    ("ground_truth", pa.string()),
                    ("ground_truth_json", pa.string()),
                ]
            ),
        ),
        ("extra_info", pa.string()),
    ]
)
_PREFERENCE_SCHEMA = pa.schema(
    [
        ("prompt", _MESSAGES),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
        ("data_source", pa.string()),
        ("margin", pa.float64()),
    ]
)
_SFT_SCHEMA = pa.schema([("messages", _MESSAGES), ("data_source", pa.string())])


def rl_row(columns: Mapping[str, Any]) -> RLRow:
    """A row of the row schema from its raw columns.

    Args:
        columns: `prompt` and `reward_model` are needed; `data_source`, `ability` and
            `extra_info` have defaults.

    Returns:
        The valid row.

    Raises:
        RowError: a column is missing, null or of the wrong shape.
    """
    return RLRow(
        data_source=check_text(columns.get("data_source", "unknown"), "data_source"),
        prompt=parse_messages(columns.get("prompt"), "prompt"),
        ability=columns.get("ability") or "",
        reward_model=_reward_model(columns.get("reward_model")),
        extra_info=parse_json_object(columns.get("extra_info"), "extra_info"),
    )


def sft_row(columns: Mapping[str, Any]) -> SFTRow:
    """A supervised row from its raw columns.

    Args:
        columns: `messages` is needed, a list or its JSON text; `data_source` has a default.

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
        parsed,
        check_text(columns.get("data_source", "unknown"), "data_source"),
    )


def preference_row(columns: Mapping[str, Any]) -> PreferenceRow:
    """A pair from its raw columns, in the forms that people publish.

    An answer is a text, a list of one message of the assistant, or a whole conversation that ends
    with it; lists may be JSON text. Without a column `prompt`, or with one that is a text, the
    conversations say what was answered; they may differ in their last message only.

    Args:
        columns: `chosen` and `rejected` are needed; `prompt`, `data_source` and `margin` may be
            absent.

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
        prompt,
        chosen,
        rejected,
        check_text(columns.get("data_source") or "unknown", "data_source"),
        _margin(columns.get("margin")),
    )


def write_rl_rows(path: Path, rows: Sequence[RLRow]) -> None:
    """Write RL or evaluation rows as parquet."""
    table = [
        {
            "data_source": row.data_source,
            "prompt": _message_columns(row.prompt),
            "ability": row.ability,
            "reward_model": _reward_columns(row.reward_model),
            "extra_info": _json_text(row.extra_info),
        }
        for row in rows
    ]
    _write(path, pa.Table.from_pylist(table, _RL_SCHEMA))


def write_sft_rows(path: Path, rows: Sequence[SFTRow]) -> None:
    """Write supervised rows as parquet."""
    table = [
        {"messages": _message_columns(row.messages), "data_source": row.data_source} for row in rows
    ]
    _write(path, pa.Table.from_pylist(table, _SFT_SCHEMA))


def write_preference_rows(path: Path, rows: Sequence[PreferenceRow]) -> None:
    """Write pairs as parquet."""
    table = [
        {
            "prompt": _message_columns(row.prompt),
            "chosen": row.chosen,
            "rejected": row.rejected,
            "data_source": row.data_source,
            "margin": row.margin,
        }
        for row in rows
    ]
    _write(path, pa.Table.from_pylist(table, _PREFERENCE_SCHEMA))


def read_preference_rows(path: Path) -> tuple[PreferenceRow, ...]:
    """Read what `write_preference_rows` wrote.

    Args:
        path: the file.

    Returns:
        The rows in order.

    Raises:
        ConfigError: the file holds something else.
    """
    return tuple(_read(path, _stored_pair))


def read_rl_rows(path: Path) -> tuple[RLRow, ...]:
    """Read what `write_rl_rows` wrote.

    Args:
        path: the file.

    Returns:
        The rows in order.

    Raises:
        ConfigError: the file holds something else.
    """
    return tuple(_read(path, rl_row))


def read_sft_rows(path: Path) -> tuple[SFTRow, ...]:
    """Read what `write_sft_rows` wrote.

    Args:
        path: the file.

    Returns:
        The rows in order.

    Raises:
        ConfigError: the file holds something else.
    """
    return tuple(_read(path, sft_row))


def _read(path: Path, parse: Any) -> Any:
    try:
        with pq.ParquetFile(path) as file:
            columns = file.read().to_pylist()
    except FileNotFoundError:
        raise ConfigError(str(path), "does not exist; need a dataset directory") from None
    except pa.ArrowInvalid as error:
        raise ConfigError(str(path), f"not a parquet file ({error})") from None
    for number, row in enumerate(columns):
        try:
            yield parse(row)
        except RowError as error:
            raise ConfigError(f"{path.name} row {number}", str(error)) from None


def _stored_pair(columns: Mapping[str, Any]) -> PreferenceRow:
    """A pair as it was written: its answers are texts, even those that are JSON of messages."""
    return PreferenceRow(
        parse_messages(columns.get("prompt"), "prompt"),
        check_text(columns.get("chosen"), "chosen"),
        check_text(columns.get("rejected"), "rejected"),
        check_text(columns.get("data_source"), "data_source"),
        _margin(columns.get("margin")),
    )


def _answer(value: object, name: str) -> tuple[tuple[Message, ...], str]:
    """The messages before an answer, none where only the answer is given, and its text."""
    value = messages_of_text(value, name)
    if value is None or isinstance(value, str):
        return (), check_text(value, name)
    messages = parse_messages(value, name)
    if messages[-1].role != "assistant":
        raise RowError(f"{name} ends with the {messages[-1].role}'s message; need the assistant's")
    return messages[:-1], messages[-1].content


def _margin(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"margin is {value!r}; need a number or null")
    return float(value)


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


def _reward_columns(reward_model: RewardModel) -> dict[str, str | None]:
    answer = reward_model.ground_truth
    is_text = isinstance(answer, str)
    return {
        "style": reward_model.style,
        "ground_truth": answer if is_text else None,
        "ground_truth_json": None if is_text or answer is None else _json_text(answer),
    }


def _message_columns(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _json_text(value: object) -> str:
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def _write(path: Path, table: pa.Table) -> None:
    pq.write_table(
        table,
        path,
        row_group_size=_ROW_GROUP_ROWS,
        compression="zstd",
        store_schema=False,
        data_page_version="2.0",
    )
