"""Files that hold the row schema already: `rows` (prompt, reward_model ...), `messages`, `pairs`.

What `engines.data.read.rows` describes, and what verl's preprocessing scripts write. Columns beyond
the schema are not read.
"""

from collections.abc import Mapping
from typing import Any

from engines.config.base import StrictModel
from engines.config.options import NoOptions
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.read.raw_rows import parse_number, preference_row, rl_row, sft_row
from engines.data.read.rows import PreferenceRow, RLRow, SFTRow, prompt_of


class RowSchema(Preprocessor[NoOptions]):
    """`data_source`, `prompt`, `ability`, `reward_model`, `extra_info`."""

    rl_columns = ("prompt", "reward_model")

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """The row as it is, validated."""
        return rl_row(columns)


class Conversations(Preprocessor[NoOptions]):
    """`messages`, ending with the assistant's."""

    sft_columns = ("messages",)

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """The row as it is, validated."""
        return sft_row(columns)


class PairsOptions(StrictModel):
    """Which columns say by how much an answer is better, and where the pairs come from."""

    score_columns: tuple[str, str] | None = None
    """Scores of the chosen and of the rejected answer, of which the margin is the difference
    (`score_chosen`, `score_rejected`); null reads the column `margin`, if there is one."""
    data_source: str | None = None
    """Instead of the column `data_source`."""


class Pairs(Preprocessor[PairsOptions]):
    """`chosen` and `rejected`, and `prompt` where they are no whole conversations."""

    preference_columns = ("chosen", "rejected")
    rl_columns = preference_columns

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """The prompt of the pair, which has no ground truth."""
        return prompt_of(self.preference_row(columns))

    def preference_row(self, columns: Mapping[str, Any]) -> PreferenceRow:
        """The row as it is, validated; see `engines.data.read.raw_rows.preference_row`."""
        given = dict(columns)
        if self.options.data_source is not None:
            given["data_source"] = self.options.data_source
        if self.options.score_columns is not None:
            scores = [parse_number(columns.get(name), name) for name in self.options.score_columns]
            given["margin"] = scores[0] - scores[1]
        return preference_row(given)
