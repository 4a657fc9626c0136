"""Read a data source into validated rows: preprocess, count what is dropped, sample, limit.

Rows go to disk as they are read (`engines.data.prepare.stored_rows`).
Promises: an unusable row is an error with file and number, or counted (`on_bad_row: drop`). A
source without a usable row is an error. Rows keep the order of their files unless `limit` takes
a seeded sample.

Create the preprocessor that a data source names.

The layout of a source, either named in the configuration or recognised from the first rows.

Promises of `auto`: a layout fits if all its columns occur in the first rows and it can read at
least one of these. It is dropped if another fitting layout has all its columns and more. Unless
exactly one remains, an error lists the columns and the known layouts. Later rows may fail in it.
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
from engines.data.order.mixing import permutation
from engines.data.prepare.files import SourceFiles, resolve_source
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.prepare.readers import BadRow, RawRow, read_file
from engines.data.prepare.stored_rows import RowWriter, StoredRows, digest_of
from engines.data.read.row_files import (
    PREFERENCE_FORMAT,
    RL_FORMAT,
    SFT_FORMAT,
    RowFormat,
    RowT,
)
from engines.data.read.rows import Message, PreferenceRow, RLRow, RowError, SFTRow
from infra.errors import ConfigError
from infra.plugins import load_row


def create_preprocessor(source: SourceConfig, field: str) -> Preprocessor[Any]:
    """Return the preprocessor of a source, with its options validated.

    Raises:
        UnknownPluginError: no preprocessor has that name.
        ConfigError: the name is ambiguous, the plugin does not load, or the options are invalid.
    """
    row = check_preprocessor(source, field)
    options = own_options(source.options, row, f"{field}.options")
    return load_row(row, f"{field}.format")(options)


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


_MAX_REASONS = 20


@dataclass(frozen=True)
class SourceReport:
    """What happened to the rows of one source.

    Attributes:
        format: name of the layout; `auto` is resolved.
        revision: commit of a hub data set; None for local files.
        num_duplicates: rows dropped since their prompt had occurred, if the preprocessor asks.
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


@dataclass(frozen=True)
class LoadedRows(Generic[RowT]):
    """Rows of one split from all its sources, with a report per source."""

    rows: StoredRows[RowT]
    reports: tuple[SourceReport, ...]


def load_rl_rows(
    sources: Sequence[SourceConfig], name: str, data: DataConfig, seed: int, scratch: Path
) -> LoadedRows[RLRow]:
    """Load the RL or evaluation rows of all sources, in order.

    Args:
        name: field of the sources, for errors (`rl`).
        scratch: directory that holds the rows; it must outlive them.

    Raises:
        ConfigError: the data cannot be used; names the place and the remedy.
    """
    return _load(sources, name, data, seed, scratch, RL_ROWS)


def load_sft_rows(
    sources: Sequence[SourceConfig], name: str, data: DataConfig, seed: int, scratch: Path
) -> LoadedRows[SFTRow]:
    """Load the supervised rows of all sources, in order; see `load_rl_rows`."""
    return _load(sources, name, data, seed, scratch, SFT_ROWS)


def load_preference_rows(
    sources: Sequence[SourceConfig], name: str, data: DataConfig, seed: int, scratch: Path
) -> LoadedRows[PreferenceRow]:
    """Load the pairs of all sources, in order; see `load_rl_rows`."""
    return _load(sources, name, data, seed, scratch, PREFERENCE_ROWS)


def first_rl_row(source: SourceConfig, path: str) -> RLRow:
    """Return the first usable row among the first `LOOK_ROWS` of each file, else `ConfigError`."""
    return _first_row(source, path, RL_ROWS)


def first_sft_row(source: SourceConfig, path: str) -> SFTRow:
    """Return the first supervised row; see `first_rl_row`."""
    return _first_row(source, path, SFT_ROWS)


def first_preference_row(source: SourceConfig, path: str) -> PreferenceRow:
    """Return the first pair; see `first_rl_row`."""
    return _first_row(source, path, PREFERENCE_ROWS)


def _first_row(source: SourceConfig, path: str, kind: RowKind[RowT]) -> RowT:
    layout = layout_of(source, path, kind)
    problems: list[ConfigError] = []
    files = resolve_source(source, path, layout.preprocessor.default_subset)
    for file in files.files:
        for raw in islice(read_file(file), LOOK_ROWS):
            if isinstance(raw, BadRow):
                problems.append(ConfigError(raw.place, raw.problem))
                continue
            absent = [name for name in layout.columns if name not in raw.columns]
            if absent:
                found = _found(file, raw.columns, files)
                problems.append(_absent_column(absent[0], raw.columns, found, source, path, layout))
                continue
            row = layout.row(raw)
            if not isinstance(row, BadRow):
                return row
            problems.append(ConfigError(row.place, row.problem))
    if problems:
        raise problems[0]
    raise ConfigError(f"{path}.path", f"{source.path}: 0 rows; need at least 1")


def _found(file: Path, columns: Iterable[str], files: SourceFiles) -> str:
    return f"not in {file.name}; columns: {', '.join(columns) or 'none'}{files.note}"


def _absent_column(
    name: str,
    columns: Iterable[str],
    found: str,
    source: SourceConfig,
    path: str,
    layout: Layout[RowT],
) -> ConfigError:
    others = [each.name for each in layouts_with(columns, source, path, layout.kind)]
    fitting = ", ".join(name for name in others if name != layout.name)
    remedy = f"; these columns fit: {fitting}" if fitting else ""
    return ConfigError(
        f"{path}.{layout.preprocessor.column_field(name)}",
        f"{name!r} {found}{remedy}",
    )


def _load(
    sources: Sequence[SourceConfig],
    name: str,
    data: DataConfig,
    seed: int,
    scratch: Path,
    kind: RowKind[RowT],
) -> LoadedRows[RowT]:
    reports = []
    with RowWriter(scratch / f"{name}.arrow", kind.format) as writer:
        for place, source in enumerate(sources):
            path = f"data.{name}.{place}"
            layout = layout_of(source, path, kind)
            if source.limit is None:
                reports.append(_load_source(source, path, data, layout, writer))
                continue
            with RowWriter(scratch / f"{name}.{place}.arrow", kind.format) as whole:
                report = _load_source(source, path, data, layout, whole)
            num_rows = min(source.limit, report.num_rows)
            stored_whole = whole.stored()
            writer.add_sample(stored_whole, _sample(report.num_rows, num_rows, seed))
            stored_whole.path.unlink()  # the sample is a copy
            num_over_limit = report.num_rows - num_rows
            reports.append(replace(report, num_rows=num_rows, num_over_limit=num_over_limit))
    return LoadedRows(writer.stored(), tuple(reports))


def _sample(num_rows: int, limit: int, seed: int) -> np.ndarray:
    return permutation(num_rows, seed)[:limit] if limit < num_rows else np.arange(num_rows)


def _load_source(
    source: SourceConfig,
    path: str,
    data: DataConfig,
    layout: Layout[RowT],
    writer: RowWriter[RowT],
) -> SourceReport:
    files = resolve_source(source, path, layout.preprocessor.default_subset)
    bad = _BadRows(data.on_bad_row == "drop")
    seen: set[bytes] = set()
    num_usable = num_rows = 0
    for file in files.files:
        for row in _parse_file(file, files, source, path, layout, bad):
            num_usable += 1
            if layout.preprocessor.drop_duplicates:
                identity = layout.kind.identity(row)
                digest = digest_of(part for m in identity for part in (m.role, m.said))
                # Dropped while reading, since a file may repeat each row a hundred times.
                if digest in seen:
                    continue
                seen.add(digest)
            num_rows += 1
            writer.add(row)
    bad.raise_if_any()
    num_read = num_usable + bad.num_rows
    if not num_rows:
        dropped = f" of {num_read} are usable" if num_read else ""
        raise ConfigError(f"{path}.path", f"{source.path}: 0 rows{dropped}; need at least 1")
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
        self.num_rows = 0
        self.reasons: Counter[str] = Counter()

    def add(self, row: BadRow) -> None:
        if row.unreadable and not self._drop:
            raise ConfigError(row.place, row.problem)
        self._first = self._first or row
        self.num_rows += 1
        reason = "unreadable" if row.unreadable else row.problem
        known = row.unreadable or reason in self.reasons or len(self.reasons) < _MAX_REASONS
        self.reasons[reason if known else "other"] += 1

    def raise_if_any(self) -> None:
        if self._first is None or self._drop:
            return
        num_alike = self.reasons[self._first.problem]
        rows = "row" if num_alike == 1 else "rows"
        raise ConfigError(
            self._first.place,
            f"{self._first.problem} ({num_alike} such {rows}; set data.on_bad_row=drop to skip and "
            "count)",
        )


def _parse_file(
    file: Path,
    files: SourceFiles,
    source: SourceConfig,
    path: str,
    layout: Layout[RowT],
    bad: _BadRows,
) -> Iterator[RowT]:
    """Yield the file's usable rows; a column that all its rows lack is a `ConfigError`."""
    missing: Counter[str] = Counter()
    seen: dict[str, None] = {}
    num_rows = 0
    for raw in read_file(file):
        if isinstance(raw, BadRow):
            bad.add(raw)
            continue
        num_rows += 1
        absent = [name for name in layout.columns if name not in raw.columns]
        if absent:
            missing.update(absent)
            seen.update(dict.fromkeys(raw.columns))
            bad.add(BadRow(raw.place, f"{absent[0]} is missing"))
            continue
        row = layout.row(raw)
        if isinstance(row, BadRow):
            bad.add(row)
        else:
            yield row
    for name, count in missing.items():
        if count == num_rows:
            raise _absent_column(name, seen, _found(file, seen, files), source, path, layout)
