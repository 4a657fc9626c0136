"""OpenR1-Math-220k: problems of NuminaMath 1.5 with answers and model-generated reasoning.

`generations` has the model's solutions; `messages` holds the problem and one of them. Source: the
card of open-r1/OpenR1-Math-220k, whose folder `all` repeats the folders `data` and `extended`.
"""

from engines.data.prepare.preprocessors.base import (
    Preprocessor,
    ProblemOptions,
    RawColumns,
    instructed,
    text_answer,
)
from engines.data.read.raw_rows import sft_row
from engines.data.read.rows import Message, RewardModel, RLRow, SFTRow

_KEPT = ("problem_type", "question_type", "source", "uuid")


class OpenR1MathOptions(ProblemOptions):
    """Options: the prompt, and the `data_source` of its rows."""

    data_source: str = "open-r1/OpenR1-Math-220k"


class OpenR1Math(Preprocessor[OpenR1MathOptions]):
    """Reads a problem, its answer, and the generation in `messages`."""

    default_subset = "data"
    # `generations` is not read; `auto` needs it, since other tables have the other columns too.
    rl_columns = ("problem", "solution", "answer", "generations")
    sft_columns = ("problem", "solution", "answer", "messages", "generations")

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Use the column `answer` as ground truth; metadata goes to `extra_info`."""
        return RLRow(
            self.options.data_source,
            (instructed(columns.get("problem"), "problem", self.options.instruction),),
            "math",
            RewardModel("rule", text_answer(columns.get("answer"), "answer")),
            {name: columns[name] for name in _KEPT if columns.get(name) is not None},
        )

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Use the answer in `messages` with the prompt of the RL row."""
        answered = sft_row({"messages": columns.get("messages")}).messages[-1]
        problem = instructed(columns.get("problem"), "problem", self.options.instruction)
        answer = Message("assistant", answered.content.strip())
        return SFTRow((problem, answer), self.options.data_source)
