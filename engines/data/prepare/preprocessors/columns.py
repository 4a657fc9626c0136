"""Any table with a question column and an answer column.

The answer is the ground truth of an RL row, or the assistant's message of a supervised row. Both
are plain texts: lists are refused, and except as ground truth also the JSON text of messages.
"""

from pydantic import Field

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns, text_answer
from engines.data.read.raw_rows import check_one_text
from engines.data.read.rows import Message, RewardModel, RLRow, SFTRow, check_text


class ColumnsOptions(StrictModel):
    """Names of the columns, and texts around the question."""

    prompt_column: str = "prompt"
    answer_column: str = "answer"
    system: str | None = Field(default=None, min_length=1)
    """System message before every question."""
    instruction: str = ""
    """Appended to every question after a space."""
    data_source: str = "columns"
    ability: str = ""


class Columns(Preprocessor[ColumnsOptions]):
    """Reads one question and one answer per row."""

    def __init__(self, options: ColumnsOptions) -> None:
        super().__init__(options)
        self.rl_columns = (options.prompt_column, options.answer_column)
        self.sft_columns = self.rl_columns

    def column_field(self, column: str) -> str:
        """Return `options.prompt_column` or `options.answer_column`."""
        is_prompt = column == self.options.prompt_column
        return "options.prompt_column" if is_prompt else "options.answer_column"

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Use the question as prompt and the answer as ground truth."""
        return RLRow(
            self.options.data_source,
            self._prompt(columns),
            self.options.ability,
            RewardModel("rule", self._answer(columns)),
        )

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Use the question as prompt and the answer as the assistant's message."""
        answer = check_one_text(self._answer(columns), self.options.answer_column)
        messages = (*self._prompt(columns), Message("assistant", answer))
        return SFTRow(messages, self.options.data_source)

    def _prompt(self, columns: RawColumns) -> tuple[Message, ...]:
        name = self.options.prompt_column
        question = check_one_text(check_text(columns.get(name), name), name)
        if self.options.instruction:
            question = f"{question} {self.options.instruction}"
        user = Message("user", question)
        return (Message("system", self.options.system), user) if self.options.system else (user,)

    def _answer(self, columns: RawColumns) -> str:
        name = self.options.answer_column
        return text_answer(columns.get(name), name)
