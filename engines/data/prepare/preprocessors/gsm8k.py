"""GSM8K (arXiv:2110.14168): grade-school word problems, columns `question` and `answer`.

`answer` is a worked solution with calculator notes (`<<48/2=24>>`) and a last line `#### 24`. The
prompt asks for a boxed answer and supervised solutions end with one, for the `math` reward.
"""

import re

from engines.data.prepare.preprocessors.base import (
    Preprocessor,
    ProblemOptions,
    RawColumns,
    instructed,
)
from engines.data.read.rows import Message, RewardModel, RLRow, RowError, SFTRow, check_text

_FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


class GSM8KOptions(ProblemOptions):
    """Options: the prompt, and the `data_source` of its rows."""

    data_source: str = "openai/gsm8k"


class GSM8K(Preprocessor[GSM8KOptions]):
    """Reads a question and its worked answer."""

    default_subset = "main"
    rl_columns = ("question", "answer")
    sft_columns = ("question", "answer")

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Use the number after `####`, without thousands separators, as ground truth."""
        _, answer = split_solution(columns.get("answer"))
        question = instructed(columns.get("question"), "question", self.options.instruction)
        return RLRow(self.options.data_source, (question,), "math", RewardModel("rule", answer))

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Use the worked solution without calculator notes, with a boxed answer."""
        solution, answer = split_solution(columns.get("answer"))
        question = instructed(columns.get("question"), "question", self.options.instruction)
        text = f"{solution}\nThe answer is \\boxed{{{answer}}}."
        return SFTRow((question, Message("assistant", text)), self.options.data_source)


def split_solution(answer: object) -> tuple[str, str]:
    """Return the solution without calculator notes, and the answer without thousands separators.

    Raises:
        RowError: the text does not end with a line `#### number`.
    """
    text = check_text(answer, "answer").strip()
    match = _FINAL_ANSWER.search(text)
    if match is None:
        raise RowError("answer does not end with '#### ' and a number")
    solution = _CALCULATOR_NOTE.sub("", text[: match.start()]).strip()
    return solution, match.group(1).replace(",", "")
