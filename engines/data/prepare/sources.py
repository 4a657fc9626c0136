"""Read a data source into validated rows: preprocess, count what is dropped, sample, limit.

Rows go to disk as they are read (`engines.data.prepare.stored_rows`).
Promises: an unusable row is an error with file and number, or counted (`on_bad_row: drop`). A
source without a usable row is an error. Rows keep the order of their files unless `limit` takes
a seeded sample.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Generic

import numpy as np

from engines.config.data import DataConfig, SourceConfig
from engines.data.order.resumable import permutation
from engines.data.prepare.files import SourceFiles, resolve_source
from engines.data.prepare.layouts import (
    LOOK_ROWS,
    PREFERENCE_ROWS,
    RL_ROWS,
    SFT_ROWS,
    Layout,
    RowKind,
    layout_of,
    layouts_with,
)
from engines.data.prepare.readers import BadRow, read_file
from engines.data.prepare.stored_rows import RowWriter, StoredRows, digest_of
from engines.data.read.row_files import RowT
from engines.data.read.rows import PreferenceRow, RLRow, SFTRow
from infra.errors import ConfigError

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
