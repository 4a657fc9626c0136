"""The layout of a source, either named in the configuration or recognised from the first rows.

Promises of `auto`: a layout fits if all its columns occur in the first rows and it can read at
least one of these. It is dropped if another fitting layout has all its columns and more. Unless
exactly one remains, an error lists the columns and the known layouts. Later rows may fail in it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic

from engines.config.data import AUTO, SourceConfig
from engines.config.plugins import recognised_layouts
from engines.data.images.store import check_images
from engines.data.prepare.files import SourceFiles, resolve_source
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.prepare.preprocessors.create import create_preprocessor
from engines.data.prepare.readers import BadRow, RawRow, read_file
from engines.data.read.row_files import (
    PREFERENCE_FORMAT,
    RL_FORMAT,
    SFT_FORMAT,
    RowFormat,
    RowT,
)
from engines.data.read.rows import Message, PreferenceRow, RLRow, RowError, SFTRow
from infra.errors import ConfigError

LOOK_ROWS = 100
"""Number of rows at the start of a file that are inspected."""
_QUESTIONS = ("question", "problem", "query", "instruction")
"""Common names for the column `prompt`."""


@dataclass(frozen=True)
class RowKind(Generic[RowT]):
    """How one kind of row is made and stored.

    `columns` returns a preprocessor's required columns, None if it makes no such rows (`refusal` is
    the error). `identity` returns messages that are equal for duplicate rows.
    """

    columns: Callable[[Preprocessor[Any]], tuple[str, ...] | None]
    parse: Callable[[Preprocessor[Any]], Callable[[Mapping[str, Any]], RowT]]
    identity: Callable[[RowT], tuple[Message, ...]]
    refusal: str
    format: RowFormat[RowT]


RL_ROWS: RowKind[RLRow] = RowKind(
    lambda layout: layout.rl_columns,
    lambda layout: layout.rl_row,
    lambda row: row.prompt,
    "this layout has no answers to check; need another",
    RL_FORMAT,
)
SFT_ROWS: RowKind[SFTRow] = RowKind(
    lambda layout: layout.sft_columns,
    lambda layout: layout.sft_row,
    lambda row: row.messages,
    "this layout has no answers to imitate; need messages or another",
    SFT_FORMAT,
)
PREFERENCE_ROWS: RowKind[PreferenceRow] = RowKind(
    lambda layout: layout.preference_columns,
    lambda layout: layout.preference_row,
    lambda row: (*row.conversations[0], *row.conversations[1]),
    "this layout has no pairs; need pairs or another",
    PREFERENCE_FORMAT,
)


@dataclass(frozen=True)
class Layout(Generic[RowT]):
    """How one source's raw rows become rows; each raw row needs `columns`."""

    name: str
    preprocessor: Preprocessor[Any]
    columns: tuple[str, ...]
    kind: RowKind[RowT]

    def row(self, raw: RawRow) -> RowT | BadRow:
        """Return the row, or what is wrong with it."""
        try:
            row = self.kind.parse(self.preprocessor)(raw.columns)
            if isinstance(row, RLRow):
                check_images(row)
            return row
        except RowError as error:
            return BadRow(raw.place, str(error))


def layout_of(source: SourceConfig, path: str, kind: RowKind[RowT]) -> Layout[RowT]:
    """Return the layout of a source, resolving `auto`.

    Raises:
        ConfigError: the layout makes no such rows; or, for `auto`, not exactly one layout fits.
    """
    if source.format == AUTO:
        return _recognised(source, path, kind)
    preprocessor = create_preprocessor(source, path)
    columns = kind.columns(preprocessor)
    if columns is None:
        raise ConfigError(f"{path}.format", kind.refusal)
    return Layout(source.format, preprocessor, columns, kind)


def layouts_with(
    columns: Iterable[str], source: SourceConfig, path: str, kind: RowKind[RowT]
) -> list[Layout[RowT]]:
    """Return the layouts whose columns are all present, in the order of the plugin table."""
    present = {*columns}
    return [each for each in _layouts(source, path, kind) if present.issuperset(each.columns)]


def _layouts(source: SourceConfig, path: str, kind: RowKind[RowT]) -> Iterator[Layout[RowT]]:
    for name in recognised_layouts():
        plain = source.model_copy(update={"format": name, "options": {}})
        preprocessor = create_preprocessor(plain, path)
        if columns := kind.columns(preprocessor):
            yield Layout(name, preprocessor, columns, kind)


def _recognised(source: SourceConfig, path: str, kind: RowKind[RowT]) -> Layout[RowT]:
    files = resolve_source(source, path, None)
    file, rows = _first_rows(files, source, path)
    present = list(dict.fromkeys(name for raw in rows for name in raw.columns))
    named = layouts_with(present, source, path, kind)
    able = [each for each in named if any(not isinstance(each.row(raw), BadRow) for raw in rows)]
    fitting = [
        each for each in able if not any({*each.columns} < {*other.columns} for other in able)
    ]
    if len(fitting) == 1:
        return fitting[0]
    found = f"got auto; columns of {file.name}: {', '.join(present) or 'none'}{files.note}"
    if fitting:
        names = ", ".join(each.name for each in fitting)
        raise ConfigError(f"{path}.format", f"{found}; {names} all fit; need one; name it")
    bad = [
        (each.name, refused) for each in named if isinstance(refused := each.row(rows[0]), BadRow)
    ]
    tried = "".join(f"; {name} cannot read {row.place} ({row.problem})" for name, row in bad)
    known = [f"{each.name} ({', '.join(each.columns)})" for each in _layouts(source, path, kind)]
    raise ConfigError(
        f"{path}.format",
        f"{found}{tried}; need those of one layout: {', '.join(known)}; or name a format, with "
        f"its options{_example(present, kind)}",
    )


def _example(present: Sequence[str], kind: RowKind[Any]) -> str:
    """Suggest `columns` if only the name of the question column differs, else nothing."""
    asked = [name for name in _QUESTIONS if name in present]
    if kind is PREFERENCE_ROWS or "answer" not in present or not asked:
        return ""
    return f", as {{format: columns, options: {{prompt_column: {asked[0]}}}}}"


def _first_rows(
    files: SourceFiles, source: SourceConfig, path: str
) -> tuple[Path, Sequence[RawRow]]:
    unreadable: list[BadRow] = []
    for file in files.files:
        read = list(islice(read_file(file), LOOK_ROWS))
        if rows := [raw for raw in read if isinstance(raw, RawRow)]:
            return file, rows
        unreadable += [raw for raw in read if isinstance(raw, BadRow)]
    if unreadable:
        raise ConfigError(unreadable[0].place, unreadable[0].problem)
    raise ConfigError(f"{path}.path", f"{source.path}: 0 rows; need at least 1")
