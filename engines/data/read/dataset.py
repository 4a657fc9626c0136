"""The dataset artifact: splits of validated rows, a summary, and perhaps a tokenizer.

    sft.parquet  rl.parquet  eval.parquet  summary.json  tokenizer/ (models made from scratch)
    preference.parquet  preference_eval.parquet (where there are such rows)
    images.parquet (where rows show images)
    decontamination.json (where `data.decontamination` asks for it)

Promises: rows come back as `engines.data.prepare.dataset` wrote them, typed and checked.
Imports without torch and transformers.
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
    """A dataset directory; rows are read when asked for."""

    directory: Path

    def sft_rows(self) -> RowFile[SFTRow]:
        """Rows of the supervised split, read as they are iterated."""
        return RowFile(self.directory / SFT_FILE, SFT_FORMAT)

    def rl_rows(self) -> RowFile[RLRow]:
        """Rows of the RL split, likewise."""
        return RowFile(self.directory / RL_FILE, RL_FORMAT)

    def evaluation_rows(self) -> RowFile[RLRow]:
        """Rows of the held-out split, likewise."""
        return RowFile(self.directory / EVALUATION_FILE, RL_FORMAT)

    def preference_rows(self) -> RowFile[PreferenceRow] | tuple[()]:
        """Pairs to train on, likewise; none where the data had none."""
        return self._pairs(PREFERENCE_FILE)

    def preference_evaluation_rows(self) -> RowFile[PreferenceRow] | tuple[()]:
        """Pairs that are held out; likewise."""
        return self._pairs(PREFERENCE_EVALUATION_FILE)

    def _pairs(self, name: str) -> RowFile[PreferenceRow] | tuple[()]:
        path = self.directory / name
        return RowFile(path, PREFERENCE_FORMAT) if path.exists() else ()

    @property
    def images_path(self) -> Path:
        """Of the images that rows show (`engines.data.images.store`); absent without any.

        Raises:
            ConfigError: it is absent, and the summary counts images.
        """
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
        """The content of summary.json."""
        return json.loads((self.directory / SUMMARY_FILE).read_text(encoding="utf-8"))

    @property
    def tokenizer_dir(self) -> Path | None:
        """The tokenizer trained on this data, if there is one."""
        path = self.directory / TOKENIZER_DIR
        return path if path.is_dir() else None


def load_dataset(directory: Path) -> Dataset:
    """Open a dataset directory.

    Args:
        directory: of a dataset artifact.

    Returns:
        The data set; nothing is read yet.

    Raises:
        ConfigError: one of its files is absent.
    """
    names = (SFT_FILE, RL_FILE, EVALUATION_FILE, SUMMARY_FILE)
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ConfigError(
            "dataset", f"{directory} has no {', '.join(absent)}; need a preprocessed dataset"
        )
    return Dataset(directory)
