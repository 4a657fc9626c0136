"""Rows in memory: those of sources as preprocessing reads them, and those of a file to write."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.config.data import DataConfig, SourceConfig
from engines.data.prepare.sources import ROW_KINDS, SourceReport, load_rows
from engines.data.read.row_files import RowFormat, RowT, in_batches, write_batches


@dataclass(frozen=True)
class LoadedRows:
    """Rows of a split, with a report per source."""

    rows: tuple[Any, ...]
    reports: tuple[SourceReport, ...]


def load(split: str, *sources: SourceConfig, seed: int = 0, **data: Any) -> LoadedRows:
    """The rows as a tuple; `data` are other fields of the configuration."""
    config = DataConfig(rl=sources, **data)
    with TemporaryDirectory() as scratch:
        rows, reports = load_rows(sources, split, config, seed, Path(scratch), ROW_KINDS[split])
        return LoadedRows(tuple(rows), reports)


def write_rows(path: Path, format: RowFormat[RowT], rows: Iterable[RowT]) -> None:
    """Write rows as `write_batches` does, with all columns in memory."""
    batches = [format.batch(batch) for batch in in_batches(rows)]
    write_batches(path, format, batches, all(map(format.is_plain, batches)))
