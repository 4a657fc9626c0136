"""The contract of a preprocessor, which makes one row from one raw row.

Promises of every preprocessor: a pure function of the raw row and its options. It raises `RowError`
for a row that it cannot use and never guesses. It does not open files, shuffle or count.
To add a layout: subclass `Preprocessor` in a new file and add its row to `engines.config.plugins`,
with the schema of its options if it has any.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from engines.config.base import StrictModel
from engines.data.read.rows import (
    Message,
    PreferenceRow,
    RewardModel,
    RLRow,
    RowError,
    SFTRow,
    check_text,
)

OptionsT = TypeVar("OptionsT", bound=StrictModel)
RawColumns = Mapping[str, Any]
"""One value per column of a raw row."""


class Preprocessor(Generic[OptionsT]):
    """Reads the rows of one layout; makes those kinds of rows whose `*_columns` is not None."""

    default_subset: ClassVar[str | None] = None
    """Folder to read if the source names none and the folder exists."""
    rl_columns: tuple[str, ...] | None = None
    """Columns that `rl_row` needs; None if the layout makes no RL rows."""
    sft_columns: tuple[str, ...] | None = None
    """Columns that `sft_row` needs; None if the layout has nothing to imitate."""
    preference_columns: tuple[str, ...] | None = None
    """Columns that `preference_row` needs; None if the layout has no pairs."""

    drop_duplicates: bool = False
    """Keep only the first row of each prompt; the others are counted."""

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    def column_field(self, column: str) -> str:
        """Return the field of the source's section that an error about an absent column names."""
        return "format"

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Make an RL or evaluation row; the columns of `rl_columns` are present.

        A layout of pairs gives the prompt of the pair, without ground truth, for a judge.
        """
        if self.preference_columns is None:
            raise RowError("this layout has no ground truth")
        pair = self.preference_row(columns)
        return RLRow(pair.data_source, pair.prompt, "chat", RewardModel("model", None))

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Make a supervised row; the columns of `sft_columns` are present."""
        raise RowError("this layout has no answer to imitate")

    def preference_row(self, columns: RawColumns) -> PreferenceRow:
        """Make a pair of answers; the columns of `preference_columns` are present."""
        raise RowError("this layout has no two answers to one prompt")


class ProblemOptions(StrictModel):
    """Options of layouts of math problems, whose answers the reward `math` reads."""

    instruction: str = "Reason step by step and put the final answer in \\boxed{}."
    """Appended to every problem after a line break; empty adds nothing."""


def optional_text(value: object, name: str) -> str | None:
    """Return a column's text; None if it is null, empty or absent. Another type is a `RowError`."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return check_text(value, name)


def instructed(value: object, name: str, instruction: str) -> Message:
    """Return the user's message: the stripped text of a column, and below it the instruction."""
    question = check_text(value, name).strip()
    return Message("user", f"{question}\n{instruction}" if instruction else question)


def text_answer(value: object, name: str) -> str:
    """Return a ground truth as stripped text; integers are converted. Else raise `RowError`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"{name} is {'null' if value is None else repr(value)}; need text")
    if not value.strip():
        raise RowError(f"{name} is empty")
    return value.strip()
