"""Read raw rows from .parquet, .json, .jsonl, .csv and .tsv files, each with its place in the file.

A .json file holds a list of objects, one object, or one object per line. It is read whole, since
only its end shows whether it is a valid list; of other files a batch of rows is in memory.
A .csv or .tsv file has a header, then one record per row (RFC 4180). Every value is text, an empty
field the empty text; a field in double quotes may hold separators, line breaks and doubled quotes.

Promises: rows come in file order. A broken line, record or row is a `BadRow` with file and number
(lines count from 1, parquet rows from 0). After a wrong quote the start of records is unknown, so
that is an error of the file. Disk failures propagate as `OSError`. Files that end with .gz are
unpacked while reading; a truncated one is an error.
Does not promise types in .csv and .tsv files: a list or an object in a field is its JSON text.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from engines.config.data import PACKED_SUFFIX, unpacked_suffix
from engines.data.read.row_files import BATCH_ROWS, damage_as_config_error, open_parquet
from infra.errors import ConfigError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MAX_FIELD_CHARACTERS = 16 * 2**20
"""Keeps an unclosed quote from loading the rest of a large file into memory."""
_DAMAGE = {
    "field larger": f"a field of the record that begins here has more than {_MAX_FIELD_CHARACTERS} "
    "characters; need fewer; close its quote, or keep such texts in .jsonl",
    "unexpected end": "the record that begins here is cut off inside quotes, so what follows is "
    "not known; close the quote",
    "new-line": "a line ends with CR alone; need LF or CR LF; save the file with such line ends",
}
"""Our error texts, by the start of the error text of Python's `csv`."""
_WRONG_QUOTES = (
    "the record that begins here is quoted wrongly ({}), so what follows is not known; need a "
    "separator or line end after a closing quote, and quotes inside a field doubled; mend the file"
)
_SHOWN_CHARACTERS = 40
_BATCH_BYTES = 64 * 2**20
"""Limit of a parquet batch, estimated from the largest mean row size of the row groups."""
_NO_VALUE = (ValueError, OverflowError, LookupError, pa.ArrowNotImplementedError)
"""Raised by Arrow for a cell without a Python value, such as a far date or an unknown time zone."""


@dataclass(frozen=True)
class RawRow:
    """A row as in its file; `place` is e.g. `train.jsonl:7` or `train.parquet row 17`."""

    place: str
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used; `unreadable` if it is not even a JSON object or record.

    `absent`: columns that the layout needs and the row lacks; if any, `present` has its columns.
    """

    place: str
    problem: str
    unreadable: bool = False
    absent: tuple[str, ...] = ()
    present: tuple[str, ...] = ()


def read_file(path: Path) -> Iterator[RawRow | BadRow]:
    """Yield the rows of a file, unusable ones as `BadRow`; `ConfigError` if the file is damaged."""
    suffix = unpacked_suffix(path)
    if suffix == ".parquet":
        yield from _read_parquet(path)
    elif suffix == ".json":
        yield from _read_json(path)
    else:
        with _opened(path) as file:
            if suffix in SEPARATORS:
                yield from read_records(file, path, SEPARATORS[suffix])
            else:
                yield from _read_json_lines(file, path)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a source file, unpacked if packed; raise `ConfigError` if its gzip data is damaged."""
    if path.suffix.lower() != PACKED_SUFFIX:
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path, "rb") as file:
            yield cast("BinaryIO", file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(str(path), f"not a whole gzip file ({error}); copy it again") from None


def _read_parquet(path: Path) -> Iterator[RawRow | BadRow]:
    with open_parquet(path) as file:
        for number, row in enumerate(chain.from_iterable(map(_rows, _batches(file, path)))):
            place = f"{path.name} row {number}"
            yield (
                BadRow(place, row, unreadable=True) if isinstance(row, str) else RawRow(place, row)
            )


def _batches(file: pq.ParquetFile, path: Path) -> Iterator[pa.RecordBatch]:
    # Fewer rows at a time if they are large, such as rows with images.
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    num_rows = max(1, min(BATCH_ROWS, _BATCH_BYTES // max(1, largest)))
    for group in range(file.num_row_groups):
        problem = f"row group {group} cannot be read ({{}}); copy it again"
        with damage_as_config_error(path, problem):
            yield from file.iter_batches(num_rows, row_groups=[group])


def _rows(batch: pa.RecordBatch) -> Sequence[dict[str, Any] | str]:
    try:
        return batch.to_pylist()
    except _NO_VALUE:
        return [_row(batch, place) for place in range(batch.num_rows)]


def _row(batch: pa.RecordBatch, place: int) -> dict[str, Any] | str:
    """Return a row; if a cell has no Python value, the problem as text."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column[place].as_py()
        except UnicodeDecodeError as error:
            return f"byte 0x{error.object[error.start]:02x} of a text is not UTF-8"
        except _NO_VALUE as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return f"column {name!r} cannot be read ({reason}); mend or leave out the column"
    return columns


def _read_json(path: Path) -> Iterator[RawRow | BadRow]:
    """Yield rows from a list, one object, or (as many .json files are) one object per line."""
    with _opened(path) as file:
        raw = file.read()
    try:
        value = _parsed(raw)
    except _BadJSON as error:
        if error.is_longer:
            yield from _read_json_lines(io.BytesIO(raw), path)
            return
        place = f"{path.name}:{error.line}" if error.line else str(path)
        raise ConfigError(place, error.problem) from None
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield _object_row(item, f"{path.name} row {number}")
    else:
        yield _object_row(value, path.name)


def _read_json_lines(lines: Iterable[bytes], path: Path) -> Iterator[RawRow | BadRow]:
    for number, raw in enumerate(lines, start=1):
        place = f"{path.name}:{number}"
        if raw.strip():
            try:
                row = _object_row(_parsed(raw.rstrip(b"\r\n")), place)
            except _BadJSON as error:
                row = BadRow(place, error.problem, unreadable=True)
            yield row


class _BadJSON(Exception):
    """A text is not JSON; `line` counts from 1, None if unknown.

    `is_longer` is True if more text follows a complete JSON value.
    """

    def __init__(self, problem: str, line: int | None = None, is_longer: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.line, self.is_longer = problem, line, is_longer


def _parsed(raw: bytes) -> object:
    """Parse a line or a file; raise `_BadJSON` if it is not UTF-8 or not JSON."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return _JSON.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        column = error.start - before.rfind(b"\n")
        problem = f"byte 0x{raw[error.start]:02x} at column {column} is not UTF-8"
        raise _BadJSON(problem, before.count(b"\n") + 1) from None
    except json.JSONDecodeError as error:
        shown = error.doc.split("\n")[error.lineno - 1].strip()
        if len(shown) > _SHOWN_CHARACTERS:
            shown = f"{shown[:_SHOWN_CHARACTERS]}..."
        problem = f"not JSON ({error.msg} at column {error.colno}): {shown}"
        raise _BadJSON(problem, error.lineno, error.msg.startswith("Extra data")) from None
    except (RecursionError, ValueError) as error:
        raise _BadJSON(f"not JSON ({error})") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
"""One decoder for all lines; `json.loads` would make one per call."""


def _object_row(value: object, place: str) -> RawRow | BadRow:
    if isinstance(value, dict):
        return RawRow(place, value)
    return BadRow(place, f"a JSON {type(value).__name__}; need an object", unreadable=True)


def read_records(file: BinaryIO, path: Path, separator: str) -> Iterator[RawRow | BadRow]:
    """Yield the records after the header in file order; empty lines are skipped.

    The place of a record is its first line. A record that is not UTF-8, or has more or fewer fields
    than the header, is a `BadRow`.

    Raises:
        ConfigError: the header is invalid, a record has wrong quotes, is cut off or has a too long
            field, or lines end with CR alone.
    """
    # The limit is global to the process; no other code here uses `csv`.
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    records = _records(csv.reader(_lines(file), delimiter=separator, strict=True), path)
    _, header = next(records, (1, []))
    names = _header(header, f"{path.name}:1", separator)
    for line, fields in records:
        place = f"{path.name}:{line}"
        if problem := _problem(names, fields):
            yield BadRow(place, problem, unreadable=True)
        else:
            yield RawRow(place, dict(zip(names, fields, strict=True)))


def _lines(file: BinaryIO) -> Iterator[str]:
    """Decode lines; bytes that are not UTF-8 become lone surrogates, which `_problem` reports."""
    for number, line in enumerate(file):
        whole = line if number else line.removeprefix(codecs.BOM_UTF8)
        yield whole.decode("utf-8", "surrogateescape")


def _records(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            known = (text for begins, text in _DAMAGE.items() if str(error).startswith(begins))
            problem = next(known, _WRONG_QUOTES.format(error))
            raise ConfigError(f"{path.name}:{begin}", problem) from None
        if fields:
            yield begin, fields


def _header(fields: list[str], place: str, separator: str) -> list[str]:
    names = [name.strip() for name in fields]
    if (problem := _problem(names, names)) is not None:
        raise ConfigError(place, f"{problem}; need a header in UTF-8")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(place, f"column {twice[0]!r} occurs twice; need different names")
    others = [other for other in (";", ",", "\t") if len(names) == 1 and other in names[0]]
    if others:
        raise ConfigError(
            place,
            f"columns are separated by {others[0]!r}; need {separator!r}; save the file with that",
        )
    return names


def _problem(names: list[str], fields: list[str]) -> str | None:
    if len(fields) != len(names):
        found = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
        return f"{found}; need {len(names)}, as in the header"
    for name, text in zip(names, fields, strict=True):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) & 0xFF
            shown = name.encode("utf-8", "replace").decode("utf-8")
            return f"byte 0x{byte:02x} in column {shown!r} is not UTF-8"
    return None
