"""DAPO-Math-17k (arXiv:2503.14476): integer-answer problems, already in the row schema.

Columns `data_source`, `prompt`, `ability`, `reward_model`, `extra_info`. The published file
repeats each of its 17 thousand problems about a hundred times; the dataset builder drops exact
repetitions of a row of this layout (`drop_duplicates`).
"""

from collections.abc import Mapping
from typing import Any

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.read.raw_rows import rl_row
from engines.data.read.rows import RLRow, RowError, SFTRow


class DAPOMath17kOptions(StrictModel):
    """What is kept."""

    drop_duplicates: bool = True
    """Keep the first row of each prompt; the others are counted in the summary."""


class DAPOMath17k(Preprocessor[DAPOMath17kOptions]):
    """The row schema; the prompt carries its own instruction."""

    rl_columns = ("prompt", "reward_model")

    def __init__(self, options: DAPOMath17kOptions) -> None:
        super().__init__(options)
        self.drop_duplicates = options.drop_duplicates

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """The row as it is, validated."""
        return rl_row(columns)

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """Refused: the data set has no worked solutions."""
        raise RowError("DAPO-Math-17k has no solutions to imitate")
