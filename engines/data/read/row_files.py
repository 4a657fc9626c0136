"""Rows as parquet columns, the layout of a dataset artifact.

    rl.parquet, eval.parquet   data_source string, prompt list<struct<role, content>>,
                               ability string, reward_model struct<style, ground_truth,
                               ground_truth_json>, extra_info string (a JSON object)
    sft.parquet                messages list<struct<role, content>>, data_source string
    preference.parquet, preference_eval.parquet
                               prompt list<struct<role, content>>, chosen string, rejected string,
                               data_source string, margin double

If a row of a file has tools, calls or images, the file has more columns. Messages get `tool_calls`
(OpenAI's form: list<struct<id, type, function<name, arguments>>>, arguments as JSON text),
`tool_call_id` and `name`. Rows get `tools` (JSON text of a list), RL rows `images` (list<string>,
digests into `engines.data.image_store`), pairs `chosen_calls` and `rejected_calls`. Content or an
answer is null if the source had none beside its calls.
A text ground truth is in `ground_truth`, any other JSON value as JSON text in `ground_truth_json`.
`extra_info` may also be a struct, as other tools write it.
Promises: what is written is read back equal. Equal rows give equal bytes for one version of
pyarrow, however they are batched. A writer holds one row group in memory.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, starmap
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engines.data.read.raw_rows import (
    parse_margin,
    parse_messages,
    parse_tool_calls,
    parse_tools,
    rl_row,
    sft_row,
)
from engines.data.read.rows import (
    Image,
    Message,
    PreferenceRow,
    RewardModel,
    RLRow,
    RowError,
    SFTRow,
    ToolCall,
    check_text,
    with_tools,
)
from infra.errors import ConfigError

RowT = TypeVar("RowT", RLRow, SFTRow, PreferenceRow)
BATCH_ROWS = 1024
"""Rows that are converted to Python objects at a time."""
_ROW_GROUP_ROWS = 64 * BATCH_ROWS
_ROW_GROUP_BYTES = 128 * 2**20
"""Ends a row group before `_ROW_GROUP_ROWS` if its texts have this many bytes."""
_BUFFER_BYTES = 2**20
_PLAIN_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_CALLS = pa.list_(
    pa.struct(
        [
            ("id", pa.string()),
            ("type", pa.string()),
            ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
        ]
    )
)
_DIGESTS = pa.list_(pa.string())
_MORE_OF_MESSAGES = pa.struct(
    [("tool_calls", _CALLS), ("tool_call_id", pa.string()), ("name", pa.string())]
)
_MESSAGES = pa.list_(pa.struct([*_PLAIN_MESSAGES.value_type, *_MORE_OF_MESSAGES]))
_REWARD_MODEL = pa.struct(
    [("style", pa.string()), ("ground_truth", pa.string()), ("ground_truth_json", pa.string())]
)
_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class RowFormat(Generic[RowT]):
    """Conversion between rows of one kind and columns.

    `plain_schema` is the subset of `schema` for files whose rows have no tools, calls or images.
    `columns` makes the arrays of `schema`; `parse` makes one row, and may raise `RowError`.
    """

    schema: pa.Schema
    plain_schema: pa.Schema
    columns: Callable[[Sequence[RowT]], list[pa.Array]]
    parse: Callable[[Mapping[str, Any]], RowT]

    def batch(self, rows: Sequence[RowT]) -> pa.RecordBatch:
        """Convert rows to a batch of `schema`."""
        return pa.RecordBatch.from_arrays(self.columns(rows), schema=self.schema)

    def is_plain(self, batch: pa.RecordBatch) -> bool:
        """True if `plain_schema` holds everything in the batch."""
        columns = [batch.column(n) for n in self.schema.names if n not in self.plain_schema.names]
        for field in self.schema:
            if field.type == _MESSAGES:
                turns = batch.column(field.name).values
                columns += [turns.field(each.name) for each in _MORE_OF_MESSAGES]
        return all(column.null_count == len(column) for column in columns)

    def plain_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Reduce a batch to the columns of `plain_schema`."""
        columns = [_plain(batch.column(field.name), field.type) for field in self.plain_schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.plain_schema)


def write_batches(
    path: Path,
    format: RowFormat[RowT],
    batches: Iterable[pa.RecordBatch],
    is_plain: bool = False,
) -> None:
    """Write columns as parquet, those of `plain_schema` if `is_plain`; batches are read once.

    A row group ends at 65,536 rows or, at a multiple of 1,024, at 128 MiB of text.
    """
    schema = format.schema
    if is_plain:
        schema, batches = format.plain_schema, map(format.plain_batch, batches)
    with pq.ParquetWriter(
        path, schema, compression="zstd", store_schema=False, data_page_version="2.0"
    ) as writer:
        for group in _row_groups(schema, batches):
            writer.write_table(group, row_group_size=_ROW_GROUP_ROWS)


@dataclass(frozen=True)
class RowFile(Generic[RowT]):
    """The rows of a file that `write_batches` wrote; each iteration reads them in batches."""

    path: Path
    format: RowFormat[RowT]

    def __len__(self) -> int:
        with open_parquet(self.path) as file:
            return file.metadata.num_rows

    def __iter__(self) -> Iterator[RowT]:
        rows = chain.from_iterable(batch.to_pylist() for batch in self.batches())
        yield from starmap(self.parse, enumerate(rows))

    def parse(self, number: int, columns: Mapping[str, Any]) -> RowT:
        """Make row `number` from one value per column; `ConfigError` if it is not valid."""
        try:
            return self.format.parse(columns)
        except RowError as error:
            raise ConfigError(f"{self.path.name} row {number}", str(error)) from None

    @property
    def schema(self) -> pa.Schema:
        """Schema of the columns in the file."""
        with open_parquet(self.path) as file:
            return file.schema_arrow

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield columns of `BATCH_ROWS` rows or fewer, in order; `ConfigError` if not parquet."""
        with (
            damage_as_config_error(self.path, "not a parquet file ({})"),
            open_parquet(self.path) as file,
        ):
            yield from file.iter_batches(BATCH_ROWS)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file with buffered reads, since a row group may be as large as the file.

    Raises:
        ConfigError: the file does not exist or is not parquet.
    """
    with damage_as_config_error(path, "not a parquet file ({})"):
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


@contextmanager
def damage_as_config_error(path: Path, problem: str) -> Iterator[None]:
    """Scope that raises `ConfigError` if a file is absent, damaged, or not supported by Arrow.

    `problem` is the error text, with `{}` for Arrow's reason.
    """
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(str(path), "does not exist; copy it again") from None
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a disk error; damage has no errno
        raise ConfigError(str(path), problem.format(error)) from None


def in_batches(rows: Iterable[RowT]) -> Iterator[list[RowT]]:
    """Yield the rows in lists of `BATCH_ROWS`; the last one may be shorter."""
    each = iter(rows)
    while batch := list(islice(each, BATCH_ROWS)):
        yield batch


def _row_groups(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield tables of one chunk each, since chunk borders change the file's bytes; at least one."""
    waiting = [schema.empty_table()]
    num_rows = num_bytes = 0
    written = False
    for block in _blocks(schema, batches):
        waiting.append(block)
        num_rows += block.num_rows
        num_bytes += sum(map(_text_bytes, block.columns))
        if num_rows == _ROW_GROUP_ROWS or num_bytes >= _ROW_GROUP_BYTES:
            group = pa.concat_tables(waiting).combine_chunks()
            waiting, num_rows, num_bytes, written = [], 0, 0, True
            yield group
    if num_rows or not written:
        yield pa.concat_tables(waiting).combine_chunks()


def _blocks(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    rest = schema.empty_table()
    for batch in batches:
        rest = pa.concat_tables([rest, pa.Table.from_batches([batch])])
        while rest.num_rows >= BATCH_ROWS:
            yield rest.slice(0, BATCH_ROWS)
            rest = rest.slice(BATCH_ROWS)
    if rest.num_rows:
        yield rest


def _text_bytes(column: pa.ChunkedArray) -> int:
    """Bytes of the texts alone; other memory of a column depends on how its batches were made."""
    if pa.types.is_struct(column.type):
        return sum(map(_text_bytes, column.flatten()))
    if pa.types.is_list(column.type):
        return _text_bytes(pc.call_function("list_flatten", [column]))
    if pa.types.is_string(column.type):
        lengths = pc.call_function("binary_length", [column])
        return pc.call_function("sum", [lengths]).as_py() or 0
    return 0


def _plain(column: pa.Array, type: pa.DataType) -> pa.Array:
    if column.type == type:
        return column
    turns = pa.StructArray.from_arrays(
        [column.values.field(field.name) for field in type.value_type],
        fields=list(type.value_type),
    )
    return pa.ListArray.from_arrays(column.offsets, turns, type=type)


def _texts(values: Sequence[str | None]) -> pa.Array:
    return pa.array(values, pa.string())


def _conversations(conversations: Sequence[Sequence[Message]]) -> pa.Array:
    flat = [message for messages in conversations for message in messages]
    columns = [_texts([m.role for m in flat]), _texts([m.content_or_null for m in flat])]
    if all(message.is_plain for message in flat):
        columns += [pa.nulls(len(flat), field.type) for field in _MORE_OF_MESSAGES]
    else:
        ids, names = ([m.tool_call_id or None for m in flat], [m.name or None for m in flat])
        columns += [_calls([m.tool_calls for m in flat]), _texts(ids), _texts(names)]
    turns = pa.StructArray.from_arrays(columns, fields=list(_MESSAGES.value_type))
    ends = np.cumsum([len(messages) for messages in conversations], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(np.insert(ends, 0, 0)), turns, type=_MESSAGES)


def _calls(calls: Sequence[Sequence[ToolCall]]) -> pa.Array:
    values = [
        [
            {
                "id": call.id or None,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in each
        ]
        or None
        for each in calls
    ]
    return pa.array(values, _CALLS)


def _tools(conversations: Sequence[Sequence[Message]]) -> pa.Array:
    offered = (messages[0].tools for messages in conversations)
    return _texts([f"[{','.join(tools)}]" if tools else None for tools in offered])


def _rewards(rewards: Sequence[RewardModel]) -> pa.Array:
    answers = [reward.ground_truth for reward in rewards]
    columns = [
        [reward.style for reward in rewards],
        [answer if isinstance(answer, str) else None for answer in answers],
        [None if isinstance(a, str) or a is None else _JSON.encode(a) for a in answers],
    ]
    return pa.StructArray.from_arrays(list(map(_texts, columns)), fields=list(_REWARD_MODEL))


def _rl_columns(rows: Sequence[RLRow]) -> list[pa.Array]:
    return [
        _texts([row.data_source for row in rows]),
        _conversations([row.prompt for row in rows]),
        _texts([row.ability for row in rows]),
        _rewards([row.reward_model for row in rows]),
        _texts([_JSON.encode(row.extra_info) if row.extra_info else "{}" for row in rows]),
        _tools([row.prompt for row in rows]),
        pa.array([[image.sha256 for image in row.images] or None for row in rows], _DIGESTS),
    ]


def _sft_columns(rows: Sequence[SFTRow]) -> list[pa.Array]:
    return [
        _conversations([row.messages for row in rows]),
        _texts([row.data_source for row in rows]),
        _tools([row.messages for row in rows]),
    ]


def _preference_columns(rows: Sequence[PreferenceRow]) -> list[pa.Array]:
    return [
        _conversations([row.prompt for row in rows]),
        _texts([row.chosen for row in rows]),
        _texts([row.rejected for row in rows]),
        _texts([row.data_source for row in rows]),
        pa.array([row.margin for row in rows], pa.float64()),
        _tools([row.prompt for row in rows]),
        _calls([row.chosen_calls for row in rows]),
        _calls([row.rejected_calls for row in rows]),
    ]


def _stored_pair(columns: Mapping[str, Any]) -> PreferenceRow:
    """Read a stored pair; its answers are plain texts, even if they look like JSON messages."""
    return PreferenceRow(
        with_tools(
            parse_messages(columns.get("prompt"), "prompt"),
            parse_tools(columns.get("tools"), "tools"),
        ),
        columns.get("chosen"),
        columns.get("rejected"),
        check_text(columns.get("data_source"), "data_source"),
        parse_margin(columns.get("margin")),
        parse_tool_calls(columns.get("chosen_calls"), "chosen_calls"),
        parse_tool_calls(columns.get("rejected_calls"), "rejected_calls"),
    )


def _schemas(*fields: tuple[str, pa.DataType], more: Iterable[str]) -> tuple[pa.Schema, pa.Schema]:
    """Return the schema of all columns, with `more` last, and the schema of plain rows."""
    types = {"tools": pa.string(), "images": _DIGESTS}
    plain = [(name, _PLAIN_MESSAGES if type == _MESSAGES else type) for name, type in fields]
    whole = [*fields, *((name, types.get(name, _CALLS)) for name in more)]
    return pa.schema(whole), pa.schema(plain)


RL_FORMAT: RowFormat[RLRow] = RowFormat(
    *_schemas(
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", _REWARD_MODEL),
        ("extra_info", pa.string()),
        more=("tools", "images"),
    ),
    _rl_columns,
    lambda columns: rl_row(
        {**columns, "images": [Image(sha256) for sha256 in columns.get("images") or ()]}
    ),
)
SFT_FORMAT: RowFormat[SFTRow] = RowFormat(
    *_schemas(("messages", _MESSAGES), ("data_source", pa.string()), more=("tools",)),
    _sft_columns,
    sft_row,
)
PREFERENCE_FORMAT: RowFormat[PreferenceRow] = RowFormat(
    *_schemas(
        ("prompt", _MESSAGES),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
        ("data_source", pa.string()),
        ("margin", pa.float64()),
        more=("tools", "chosen_calls", "rejected_calls"),
    ),
    _preference_columns,
    _stored_pair,
)
