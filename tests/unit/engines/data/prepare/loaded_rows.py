"""Rows of sources as preprocessing reads them, in memory."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.config.data import DataConfig, SourceConfig
from engines.data.prepare.sources import ROW_KINDS, LoadedRows, load_rows


def load(split: str, *sources: SourceConfig, seed: int = 0, **data: Any) -> LoadedRows[Any]:
    """The rows as a tuple; `data` are other fields of the configuration."""
    config = DataConfig(rl=sources, **data)
    with TemporaryDirectory() as scratch:
        loaded = load_rows(sources, split, config, seed, Path(scratch), ROW_KINDS[split])
        return replace(loaded, rows=tuple(loaded.rows))  # type: ignore[arg-type]
