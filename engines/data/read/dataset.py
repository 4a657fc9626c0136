"""The dataset artifact: splits of validated rows, a summary, and optionally a tokenizer.

    sft.parquet  rl.parquet  eval.parquet  summary.json  tokenizer/ (models made from scratch)
    preference.parquet  preference_eval.parquet (if there are pairs)
    images.parquet (if rows have images)
    decontamination.json (with `data.decontamination`)

Imports neither torch nor transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.data.read.row_files import PREFERENCE_FORMAT, RL_FORMAT, SFT_FORMAT, RowFile
from engines.data.read.rows import PreferenceRow, RLRow, SFTRow
from infra.errors import ConfigError

SFT_FILE, RL_FILE, EVALUATION_FILE = "sft.parquet", "rl.parquet", "eval.parquet"
PREFERENCE_FILE = "preference.parquet"
PREFERENCE_EVALUATION_FILE = "preference_eval.parquet"
SUMMARY_FILE = "summary.json"
IMAGES_FILE = "images.parquet"
DECONTAMINATION_FILE = "decontamination.json"
TOKENIZER_DIR = "tokenizer"


@dataclass(frozen=True)
class Dataset:
    """A dataset directory; rows are read when they are iterated."""

    directory: Path

    def sft_rows(self) -> RowFile[SFTRow]:
        """Return the rows of the supervised split."""
        return RowFile(self.directory / SFT_FILE, SFT_FORMAT)

    def rl_rows(self) -> RowFile[RLRow]:
        """Return the rows of the RL split."""
        return RowFile(self.directory / RL_FILE, RL_FORMAT)

    def evaluation_rows(self) -> RowFile[RLRow]:
        """Return the rows of the held-out split."""
        return RowFile(self.directory / EVALUATION_FILE, RL_FORMAT)

    def preference_rows(self) -> RowFile[PreferenceRow] | tuple[()]:
        """Return the pairs to train on; empty if there are none."""
        return self._pairs(PREFERENCE_FILE)

    def preference_evaluation_rows(self) -> RowFile[PreferenceRow] | tuple[()]:
        """Return the held-out pairs; empty if there are none."""
        return self._pairs(PREFERENCE_EVALUATION_FILE)

    def _pairs(self, name: str) -> RowFile[PreferenceRow] | tuple[()]:
        path = self.directory / name
        return RowFile(path, PREFERENCE_FORMAT) if path.exists() else ()

    @property
    def images_path(self) -> Path:
        """Path of the image file; if it is absent though the summary counts some, `ConfigError`."""
        path = self.directory / IMAGES_FILE
        num_images = 0 if path.is_file() else self.summary().get("num_images", 0)
        if num_images:
            raise ConfigError(
                "dataset",
                f"{self.directory} has no {IMAGES_FILE}, though its {SUMMARY_FILE} counts "
                f"{num_images} images; need all files of the data set; copy it again",
            )
        return path

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return json.loads((self.directory / SUMMARY_FILE).read_text(encoding="utf-8"))

    @property
    def tokenizer_dir(self) -> Path | None:
        """Directory of the tokenizer trained on this data, or None."""
        path = self.directory / TOKENIZER_DIR
        return path if path.is_dir() else None


def load_dataset(directory: Path) -> Dataset:
    """Open a dataset directory without reading rows; `ConfigError` if a file is absent."""
    names = (SFT_FILE, RL_FILE, EVALUATION_FILE, SUMMARY_FILE)
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ConfigError(
            "dataset", f"{directory} has no {', '.join(absent)}; need a preprocessed dataset"
        )
    return Dataset(directory)
