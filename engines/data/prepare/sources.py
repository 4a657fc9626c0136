"""Read a data source into validated rows: find its layout, preprocess, count drops, sample.

Rows go to disk as they are read (`engines.data.prepare.stored_rows`).

Promises: an unusable row is an error with file and number, or counted (`on_bad_row: drop`). A
source without a usable row is an error. Rows keep the order of their files unless `limit` takes
a seeded sample. With `auto`, a layout fits if all its columns occur in the first rows and it can
read at least one of these. It is dropped if another fitting layout has all its columns and more.
Unless exactly one remains, an error lists the columns and the layouts to choose from.
Does not promise: that a layout found by `auto` can read the later rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import numpy as np

from engines.config.data import AUTO, DataConfig, SourceConfig
from engines.config.options import check_preprocessor, own_options
from engines.config.plugins import recognised_layouts
from engines.data.image_store import check_images
from engines.data.order import permutation
from engines.data.prepare.files import SourceFiles, resolve_source
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.prepare.readers import BadRow, RawRow, read_file
from engines.data.prepare.stored_rows import RowWriter, StoredRows, digest_of, writing_rows
from engines.data.read.row_files import (
    PREFERENCE_FORMAT,
    RL_FORMAT,
    SFT_FORMAT,
    RowFormat,
    RowT,
)
from engines.data.read.rows import PreferenceRow, RLRow, RowError, SFTRow
from infra.errors import ConfigError
from infra.plugins import load_row

LOOK_ROWS = 100
"""Number of rows at the start of a file that are inspected."""
_QUESTIONS = ("question", "problem", "query", "instruction")
"""Common names for the column `prompt`."""
_MAX_REASONS = 20


@dataclass(frozen=True)
class RowKind(Generic[RowT]):
    """How one kind of row is made and stored.

    `columns` returns a preprocessor's required columns, None if it makes no such rows (`refusal` is
    the error).
    """

    columns: Callable[[Preprocessor[Any]], tuple[str, ...] | None]
    parse: Callable[[Preprocessor[Any]], Callable[[Mapping[str, Any]], RowT]]
    refusal: str
    format: RowFormat[RowT]


RL_ROWS: RowKind[RLRow] = RowKind(
    lambda layout: layout.rl_columns,
    lambda layout: layout.rl_row,
    "this layout has no answers to check; need another",
    RL_FORMAT,
)
SFT_ROWS: RowKind[SFTRow] = RowKind(
    lambda layout: layout.sft_columns,
    lambda layout: layout.sft_row,
    "this layout has no answers to imitate; need messages or another",
    SFT_FORMAT,
)
PREFERENCE_ROWS: RowKind[PreferenceRow] = RowKind(
    lambda layout: layout.preference_columns,
    lambda layout: layout.preference_row,
    "this layout has no pairs; need pairs or another",
    PREFERENCE_FORMAT,
)


ROW_KINDS: Mapping[str, RowKind[Any]] = {
    "sft": SFT_ROWS,
    "rl": RL_ROWS,
    "evaluation": RL_ROWS,
    "preference": PREFERENCE_ROWS,
    "preference_evaluation": PREFERENCE_ROWS,
}
"""The kind of the rows of each split."""


@dataclass(frozen=True)
class SourceReport:
    """What happened to the rows of one source.

    Attributes:
        format: name of the layout; `auto` is resolved.
        revision: commit of a hub data set; None for local files.
        num_duplicates: repeated rows dropped, if the preprocessor has `drop_duplicates`.
        num_bad: rows dropped as invalid, by reason.
        passed_over: files that were not read; see `SourceFiles`.
    """

    format: str
    revision: str | None
    num_read: int
    num_rows: int
    num_duplicates: int = 0
    num_over_limit: int = 0
    num_bad: Mapping[str, int] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


def load_rows(
    sources: Sequence[SourceConfig],
    name: str,
    data: DataConfig,
    seed: int,
    scratch: Path,
    kind: RowKind[RowT],
) -> tuple[StoredRows[RowT], tuple[SourceReport, ...]]:
    """Load the rows of all sources of a split, in order; return them with a report per source.

    Args:
        name: the split, for errors (`rl`).
        scratch: directory that holds the rows; it must outlive them.

    Raises:
        ConfigError: the data cannot be used; names the place and the remedy.
    """
    reports = []
    with writing_rows(scratch / f"{name}.arrow", kind.format) as writer:
        for place, source in enumerate(sources):
            layout = layout_of(source, f"data.{name}.{place}", kind)
            if source.limit is None:
                reports.append(_load_source(layout, data, writer))
                continue
            with writing_rows(scratch / f"{name}.{place}.arrow", kind.format) as whole:
                report = _load_source(layout, data, whole)
            order = np.arange(report.num_rows)
            if source.limit < report.num_rows:
                order = permutation(report.num_rows, seed)[: source.limit]
            stored = whole.stored()
            writer.add_sample(stored, order)
            stored.path.unlink()  # the sample is a copy
            num_over_limit = report.num_rows - len(order)
            reports.append(replace(report, num_rows=len(order), num_over_limit=num_over_limit))
    return writer.stored(), tuple(reports)


def first_usable_row(source: SourceConfig, path: str, kind: RowKind[RowT]) -> RowT:
    """Return the first usable row among the first `LOOK_ROWS` of each file, else `ConfigError`."""
    layout = layout_of(source, path, kind)
    files = layout.files()
    problem: ConfigError | None = None
    for file in files.files:
        for row in map(layout.row, islice(read_file(file), LOOK_ROWS)):
            if not isinstance(row, BadRow):
                return row
            if problem is None and row.absent:
                problem = _absent_column(layout, row.absent[0], row.present, file, files)
            problem = problem or ConfigError(row.place, row.problem)
    raise problem or ConfigError(f"{path}.path", f"{source.path}: 0 rows; need at least 1")


def create_preprocessor(source: SourceConfig, field: str) -> Preprocessor[Any]:
    """Return the preprocessor of a source, with its options validated.

    Raises:
        UnknownPluginError: no preprocessor has that name.
        ConfigError: the name is ambiguous, the plugin does not load, or the options are invalid.
    """
    row = check_preprocessor(source, field)
    options = own_options(source.options, row, f"{field}.options")
    return load_row(row, f"{field}.format")(options)


@dataclass(frozen=True)
class Layout(Generic[RowT]):
    """How the raw rows of the source at `path` become rows; each raw row needs `columns`."""

    source: SourceConfig
    path: str
    name: str
    preprocessor: Preprocessor[Any]
    columns: tuple[str, ...]
    kind: RowKind[RowT]

    def files(self) -> SourceFiles:
        """Find the files of the source."""
        return resolve_source(self.source, self.path, self.preprocessor.default_subset)

    def row(self, raw: RawRow | BadRow) -> RowT | BadRow:
        """Convert a raw row; return a `BadRow` with the problem if that fails."""
        if isinstance(raw, BadRow):
            return raw
        absent = tuple(name for name in self.columns if name not in raw.columns)
        if absent:
            return BadRow(
                raw.place, f"{absent[0]} is missing", absent=absent, present=tuple(raw.columns)
            )
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
        ConfigError: the layout is unknown or makes no such rows; for `auto`, not one layout fits.
    """
    if source.format == AUTO:
        return _recognised(source, path, kind)
    preprocessor = create_preprocessor(source, path)
    columns = kind.columns(preprocessor)
    if columns is None:
        raise ConfigError(f"{path}.format", kind.refusal)
    return Layout(source, path, source.format, preprocessor, columns, kind)


def _layouts(source: SourceConfig, path: str, kind: RowKind[RowT]) -> Iterator[Layout[RowT]]:
    """Yield the layouts that `auto` may choose for rows of `kind`, in the order of the table."""
    for name in recognised_layouts():
        plain = source.model_copy(update={"format": name, "options": {}})
        preprocessor = create_preprocessor(plain, path)
        if columns := kind.columns(preprocessor):
            yield Layout(source, path, name, preprocessor, columns, kind)


def _recognised(source: SourceConfig, path: str, kind: RowKind[RowT]) -> Layout[RowT]:
    files = resolve_source(source, path, None)
    file, rows = _first_rows(files, source, path)
    present = list(dict.fromkeys(name for raw in rows for name in raw.columns))
    known = list(_layouts(source, path, kind))
    named = [each for each in known if {*each.columns} <= {*present}]
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
    tried = "".join(
        f"; {each.name} cannot read {bad.place} ({bad.problem})"
        for each in named
        if isinstance(bad := each.row(rows[0]), BadRow)
    )
    needs = ", ".join(f"{each.name} ({', '.join(each.columns)})" for each in known)
    example = ""
    asked = [name for name in _QUESTIONS if name in present and "answer" in present]
    if asked and kind is not PREFERENCE_ROWS:
        example = f", as {{format: columns, options: {{prompt_column: {asked[0]}}}}}"
    raise ConfigError(
        f"{path}.format",
        f"{found}{tried}; need those of one layout: {needs}; or name a format, with its options"
        f"{example}",
    )


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


def _absent_column(
    layout: Layout[RowT], name: str, present: Iterable[str], file: Path, files: SourceFiles
) -> ConfigError:
    others = [
        each.name
        for each in _layouts(layout.source, layout.path, layout.kind)
        if each.name != layout.name and {*each.columns} <= {*present}
    ]
    return ConfigError(
        f"{layout.path}.{layout.preprocessor.column_field(name)}",
        f"{name!r} not in {file.name}; columns: {', '.join(present) or 'none'}{files.note}"
        + (f"; these columns fit: {', '.join(others)}" if others else ""),
    )


def _load_source(layout: Layout[RowT], data: DataConfig, writer: RowWriter[RowT]) -> SourceReport:
    files = layout.files()
    bad = _BadRows(data.on_bad_row == "drop")
    seen: set[bytes] = set()
    num_usable = num_rows = 0
    for file in files.files:
        for row in _parse_file(layout, file, files, bad):
            num_usable += 1
            if layout.preprocessor.drop_duplicates:
                digest = digest_of(part for m in row.messages for part in (m.role, m.said))
                # Dropped while reading, since a file may repeat each row a hundred times.
                if digest in seen:
                    continue
                seen.add(digest)
            num_rows += 1
            writer.add(row)
    bad.raise_if_any()
    num_read = num_usable + bad.reasons.total()
    if not num_rows:
        dropped = f" of {num_read} are usable" if num_read else ""
        raise ConfigError(
            f"{layout.path}.path", f"{layout.source.path}: 0 rows{dropped}; need at least 1"
        )
    return SourceReport(
        format=layout.name,
        revision=files.revision,
        num_read=num_read,
        num_rows=num_rows,
        num_duplicates=num_usable - num_rows,
        num_bad=dict(sorted(bad.reasons.items())),
        passed_over=files.passed_over,
    )


class _BadRows:
    """Counts unusable rows, or raises the first one with the number of rows of the same problem."""

    def __init__(self, drop: bool) -> None:
        self._drop = drop
        self._first: BadRow | None = None
        self.reasons: Counter[str] = Counter()

    def add(self, row: BadRow) -> None:
        if row.unreadable and not self._drop:
            raise ConfigError(row.place, row.problem)
        self._first = self._first or row
        reason = "unreadable" if row.unreadable else row.problem
        known = row.unreadable or reason in self.reasons or len(self.reasons) < _MAX_REASONS
        self.reasons[reason if known else "other"] += 1

    def raise_if_any(self) -> None:
        if self._first and not self._drop:
            num_alike = self.reasons[self._first.problem]
            rows = "row" if num_alike == 1 else "rows"
            raise ConfigError(
                self._first.place,
                f"{self._first.problem} ({num_alike} such {rows}; set data.on_bad_row=drop to skip "
                "and count)",
            )


def _parse_file(
    layout: Layout[RowT], file: Path, files: SourceFiles, bad: _BadRows
) -> Iterator[RowT]:
    """Yield the file's usable rows; a column that all its rows lack is a `ConfigError`."""
    absent: Counter[str] = Counter()
    present: dict[str, None] = {}
    num_rows = 0
    for row in map(layout.row, read_file(file)):
        if not isinstance(row, BadRow):
            num_rows += 1
            yield row
            continue
        bad.add(row)
        num_rows += not row.unreadable
        absent.update(row.absent)
        present.update(dict.fromkeys(row.present))
    for name, count in absent.items():
        if count == num_rows:
            raise _absent_column(layout, name, present, file, files)
