"""Read raw rows from .csv and .tsv files: a header, then one record per row (RFC 4180).

Promises: rows come in file order while the file is read. Every value is text, an empty field the
empty text; a field in double quotes may hold separators, line breaks and doubled quotes. A record
that is not UTF-8 or has another length than the header is a `BadRow` with its first line. After a
wrong quote the start of records is unknown, so that is an error of the file.
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
"""Keeps an unclosed quote from loading the rest of a large file into memory."""
_UNKNOWN = "so what follows is not known"


@dataclass(frozen=True)
class Record:
    """One record; `line` is its first line, from 1. If `problem` is set, `fields` is empty."""

    line: int
    fields: dict[str, str]
    problem: str | None = None


def read_records(file: BinaryIO, path: Path, separator: str) -> Iterator[Record]:
    """Yield the records after the header in file order; empty lines are skipped.

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
        problem = _problem(names, fields)
        known = {} if problem else zip(names, fields, strict=True)
        yield Record(line, dict(known), problem)


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
            raise ConfigError(f"{path.name}:{begin}", _damage(str(error))) from None
        if fields:
            yield begin, fields


def _damage(reason: str) -> str:
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
