"""Raw rows from .csv and .tsv files: a header, then one record per row (RFC 4180).

Promises: rows come in file order and as they are read; every value is text, an empty field the
empty text; a field in double quotes may hold separators, line breaks and doubled quotes; a record
that is not UTF-8 or of another length than the header comes as a `BadRow` with the line it begins
at. Behind a wrong quote nobody knows where a record begins: that is an error of the file.
Does not promise types: a list or an object in a field is its JSON text.
"""

import codecs
import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from infra.errors import ConfigError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MAX_FIELD_CHARACTERS = 16 * 2**20
"""A quote that is never closed must not take the whole of a large file into memory."""
_UNKNOWN = "so what follows is not known"


@dataclass(frozen=True)
class Record:
    """One record of a file.

    Attributes:
        line: where it begins, from 1.
        fields: by column; empty where the record cannot be used.
        problem: why it cannot.
    """

    line: int
    fields: dict[str, str]
    problem: str | None = None


def read_records(file: BinaryIO, path: Path, separator: str) -> Iterator[Record]:
    """The records behind the header.

    Args:
        file: open, at its start.
        path: its name, for errors.
        separator: of fields, one character.

    Yields:
        Record: in file order; empty lines are none.

    Raises:
        ConfigError: the header is no list of different names, separated in this way; a record is
            quoted wrongly, or cut off, or a field of it is too long; lines end with CR alone.
    """
    # The limit belongs to the process; nothing else here reads such files.
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    records = _records(csv.reader(_lines(file), delimiter=separator, strict=True), path)
    _, header = next(records, (1, []))
    names = _header(header, f"{path.name}:1", separator)
    for line, fields in records:
        problem = _problem(names, fields)
        known = {} if problem else zip(names, fields, strict=True)
        yield Record(line, dict(known), problem)


def _lines(file: BinaryIO) -> Iterator[str]:
    """Bytes that are not UTF-8 become lone surrogates, which `_problem` finds in their record."""
    for number, line in enumerate(file):
        whole = line if number else line.removeprefix(codecs.BOM_UTF8)
        yield whole.decode("utf-8", "surrogateescape")


def _records(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each record's first line and its fields."""
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ConfigError(f"{path.name}:{begin}", _damage(str(error))) from None
        if fields:
            yield begin, fields


def _damage(reason: str) -> str:
    """What to do about a record that the library cannot read, by the beginning of its reason."""
    if reason.startswith("field larger"):
        return (
            f"a field of the record that begins here has more than {_MAX_FIELD_CHARACTERS} "
            "characters; need fewer; close its quote, or keep such texts in .jsonl"
        )
    if reason.startswith("unexpected end"):
        return f"the record that begins here is cut off inside quotes, {_UNKNOWN}; close the quote"
    if reason.startswith("new-line"):
        return "a line ends with CR alone; need LF or CR LF; save the file with such line ends"
    return (
        f"the record that begins here is quoted wrongly ({reason}), {_UNKNOWN}; need a separator "
        "or line end behind a closing quote, and quotes inside a field doubled; mend the file"
    )


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
    """Why the fields are no record under these names."""
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
