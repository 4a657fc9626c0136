"""Files that hold the row schema already: `rows` (prompt, reward_model ...) and `messages`.

What `engines.data.read.rows` describes, and what verl's preprocessing scripts write. Columns beyond
the schema are not read.
"""

from collections.abc import Mapping
from typing import Any

from engines.config.options import NoOptions
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.read.row_files import rl_row, sft_row
from engines.data.read.rows import RLRow, RowError, SFTRow


class RowSchema(Preprocessor[NoOptions]):
    """`data_source`, `prompt`, `ability`, `reward_model`, `extra_info`."""

    rl_columns = ("prompt", "reward_model")

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """The row as it is, validated."""
        return rl_row(columns)

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """Refused: the row schema has no answer to imitate."""
        raise RowError("an RL row has no answer to imitate")


class Conversations(Preprocessor[NoOptions]):
    """`messages`, ending with the assistant's."""

    sft_columns = ("messages",)

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """Refused: a conversation has no ground truth."""
        raise RowError("a conversation has no ground truth")

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """The row as it is, validated."""
        return sft_row(columns)
