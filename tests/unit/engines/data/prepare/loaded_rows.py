"""Rows of sources as preprocessing reads them, in memory."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.config.data import DataConfig, SourceConfig
from engines.data.prepare.sources import (
    LoadedRows,
    load_preference_rows,
    load_rl_rows,
    load_sft_rows,
)

_LOADERS = {
    "rl": load_rl_rows,
    "sft": load_sft_rows,
    "evaluation": load_rl_rows,
    "preference": load_preference_rows,
}


def load(split: str, *sources: SourceConfig, seed: int = 0, **data: Any) -> LoadedRows[Any]:
    """The rows as a tuple; `data` are other fields of the configuration."""
    config = DataConfig(rl=sources, **data)
    with TemporaryDirectory() as scratch:
        loaded = _LOADERS[split](sources, split, config, seed, Path(scratch))
        return replace(loaded, rows=tuple(loaded.rows))  # type: ignore[arg-type]
