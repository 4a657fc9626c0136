"""DAPO-Math-17k (arXiv:2503.14476): integer-answer problems in the row schema.

The published file repeats each of its 17 thousand problems about a hundred times, so rows with the
same prompt are dropped by default.
"""

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns
from engines.data.read.raw_rows import rl_row
from engines.data.read.rows import RLRow


class DAPOMath17kOptions(StrictModel):
    """Handling of repeated rows."""

    drop_duplicates: bool = True
    """Keep only the first row of each prompt; the summary counts the others."""


class DAPOMath17k(Preprocessor[DAPOMath17kOptions]):
    """Reads the row schema; adds no instruction, since the prompts include one."""

    rl_columns = ("prompt", "reward_model")

    def __init__(self, options: DAPOMath17kOptions) -> None:
        super().__init__(options)
        self.drop_duplicates = options.drop_duplicates

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Validate the row."""
        return rl_row(columns)
