"""MATH (arXiv:2103.03874): competition problems, columns `problem`, `solution`, `level`, `type`.

The ground truth is the column `answer` if there is one, else the content of the solution's last
`\\boxed{}`. Reads the published forms: one JSON file per problem in folders per split and subject,
and tables with these columns, or with `answer`, `subject` and `unique_id` (HuggingFaceH4/MATH-500).
"""

import re

from engines.data.prepare.preprocessors.base import (
    Preprocessor,
    ProblemOptions,
    RawColumns,
    instructed,
    text_answer,
)
from engines.data.read.rows import Message, RewardModel, RLRow, RowError, SFTRow, check_text

_KEPT = ("level", "type", "subject", "unique_id")
_COMMANDS = ("\\boxed", "\\fbox")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


class MATHOptions(ProblemOptions):
    """Options: the prompt, and the `data_source` of its rows."""

    data_source: str = "math"


class MATH(Preprocessor[MATHOptions]):
    """Reads a problem and its worked solution."""

    rl_columns = ("problem", "solution")
    sft_columns = ("problem", "solution")

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Use the answer as ground truth; metadata goes to `extra_info`."""
        answer = columns.get("answer")
        if answer is None:
            answer = last_boxed(check_text(columns.get("solution"), "solution"))
        return RLRow(
            self.options.data_source,
            (instructed(columns.get("problem"), "problem", self.options.instruction),),
            "math",
            RewardModel("rule", text_answer(answer, "answer")),
            {name: columns[name] for name in _KEPT if columns.get(name) is not None},
        )

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Use the worked solution as it is, since it boxes its answer."""
        solution = check_text(columns.get("solution"), "solution")
        last_boxed(solution)
        problem = instructed(columns.get("problem"), "problem", self.options.instruction)
        answer = Message("assistant", solution.strip())
        return SFTRow((problem, answer), self.options.data_source)


def last_boxed(solution: str) -> str:
    """Return the last `\\boxed{...}`, `\\boxed x` or `\\fbox{...}`; `RowError` if none or empty."""
    start, command = max((solution.rfind(command), command) for command in _COMMANDS)
    if start < 0:
        raise RowError("solution has no \\boxed{} answer")
    rest = solution[start + len(command) :]
    words = rest.strip().split("$")[0].split()[:1] if rest.startswith(" ") else [_braced(rest)]
    answer = "".join(words).strip()
    if not answer:
        raise RowError("the last \\boxed{} of the solution is empty")
    return answer


def _braced(text: str) -> str:
    """Return the content of the leading braces; `\\{` and `\\}` do not count."""
    depth = 0
    for mark in _BRACES.finditer(text) if text.startswith("{") else ():
        depth += (mark[0] == "{") - (mark[0] == "}")
        if depth == 0:
            return text[1 : mark.start()]
    raise RowError("the last \\boxed of the solution has no closing brace")
