"""The layouts `rows`, `messages` and `pairs`: the row schema, as verl's scripts write it, too."""

from engines.config.base import StrictModel
from engines.config.options import NoOptions
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns
from engines.data.read.raw_rows import parse_number, preference_row, rl_row, sft_row
from engines.data.read.rows import PreferenceRow, RLRow, SFTRow


class RowSchema(Preprocessor[NoOptions]):
    """Reads `data_source`, `prompt`, `ability`, `reward_model`, `extra_info`."""

    rl_columns = ("prompt", "reward_model")

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Validate the row."""
        return rl_row(columns)


class Conversations(Preprocessor[NoOptions]):
    """Reads `messages`, which end with the assistant's message."""

    sft_columns = ("messages",)

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Validate the row."""
        return sft_row(columns)


class PairsOptions(StrictModel):
    """Columns of the margin, and the `data_source` of its rows."""

    score_columns: tuple[str, str] | None = None
    """Score columns of the chosen and the rejected answer (`score_chosen`, `score_rejected`), whose
    difference is the margin; null reads the column `margin`, if there is one."""
    data_source: str | None = None
    """Replaces the column `data_source`."""


class Pairs(Preprocessor[PairsOptions]):
    """Reads `chosen` and `rejected`, and `prompt` if they are not whole conversations."""

    preference_columns = ("chosen", "rejected")
    rl_columns = preference_columns

    def preference_row(self, columns: RawColumns) -> PreferenceRow:
        """Validate the row; see `engines.data.read.raw_rows.preference_row`."""
        given = dict(columns)
        if self.options.data_source is not None:
            given["data_source"] = self.options.data_source
        if self.options.score_columns is not None:
            scores = [parse_number(columns.get(name), name) for name in self.options.score_columns]
            given["margin"] = scores[0] - scores[1]
        return preference_row(given)
