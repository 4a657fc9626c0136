"""The contract of a preprocessor: one raw row in, one row of the schema out.

Promises of every preprocessor: a pure function of the raw row and its options; a row it cannot
use raises `RowError`, it never guesses. It does not open files, shuffle or count.
To add a layout: subclass `Preprocessor` in a new file and add its row to `engines.config.plugins`,
with the schema of its options if it has any.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from engines.config.base import StrictModel
from engines.data.read.rows import PreferenceRow, RLRow, RowError, SFTRow, check_text

OptionsT = TypeVar("OptionsT", bound=StrictModel)


class Preprocessor(Generic[OptionsT]):
    """Reads the rows of one layout. A kind of row that it does not name columns of is refused.

    Args:
        options: an instance of the schema that its row names; `NoOptions` without one.
    """

    default_subset: ClassVar[str | None] = None
    """Folder to read when the source names none and the folder exists."""
    rl_columns: tuple[str, ...] | None = None
    """Columns that `rl_row` needs; None when the layout has no answers to check."""
    sft_columns: tuple[str, ...] | None = None
    """Columns that `sft_row` needs; None when the layout has nothing to imitate."""
    preference_columns: tuple[str, ...] | None = None
    """Columns that `preference_row` needs; None when the layout has no two answers."""

    drop_duplicates: bool = False
    """Keep only the first row of each prompt; the others are counted."""

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    def column_field(self, column: str) -> str:
        """The configuration field, below the source's, that asks for a column."""
        return "format"

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """An RL or evaluation row.

        Args:
            columns: of the raw row; those of `rl_columns` are there.

        Returns:
            The valid row.

        Raises:
            RowError: the raw row cannot be used.
        """
        raise RowError("this layout has no ground truth")

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """A supervised row.

        Args:
            columns: of the raw row; those of `sft_columns` are there.

        Returns:
            The valid row.

        Raises:
            RowError: the raw row cannot be used.
        """
        raise RowError("this layout has no answer to imitate")

    def preference_row(self, columns: Mapping[str, Any]) -> PreferenceRow:
        """A pair of answers.

        Args:
            columns: of the raw row; those of `preference_columns` are there.

        Returns:
            The valid row.

        Raises:
            RowError: the raw row cannot be used.
        """
        raise RowError("this layout has no two answers to one prompt")


def optional_text(value: object, name: str) -> str | None:
    """The text of a column that may be null, empty or absent.

    Args:
        value: of the raw column.
        name: of the column, for errors.

    Returns:
        The text as it is; None where there is none.

    Raises:
        RowError: it is of another type, or no Unicode.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return check_text(value, name)


def text_answer(value: object, name: str) -> str:
    """A ground truth as text; whole numbers are accepted as they are often stored.

    Args:
        value: of the raw column.
        name: of the column, for errors.

    Returns:
        The text without white space around it.

    Raises:
        RowError: it is null, empty or of another type.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"{name} is {'null' if value is None else repr(value)}; need text")
    if not value.strip():
        raise RowError(f"{name} is empty")
    return value.strip()
