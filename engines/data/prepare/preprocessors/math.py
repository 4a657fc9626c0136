"""MATH (arXiv:2103.03874): competition problems, columns `problem`, `solution`, `level`, `type`.

The final answer is the content of the last `\\boxed{}` of the solution, or the column `answer` if
there is one. The published forms are read: one JSON file per problem in folders per split and
subject, and tables with these columns, or with `answer`, `subject` and `unique_id` (the card of
HuggingFaceH4/MATH-500).
"""

from collections.abc import Mapping
from typing import Any

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, text_answer
from engines.data.prepare.preprocessors.gsm8k import INSTRUCTION
from engines.data.read.rows import Message, RewardModel, RLRow, RowError, SFTRow, check_text

_KEPT = ("level", "type", "subject", "unique_id")
_COMMANDS = ("\\boxed", "\\fbox")


class MATHOptions(StrictModel):
    """How the problem is put."""

    instruction: str = INSTRUCTION
    """Added to every problem after a line break; empty adds nothing."""
    data_source: str = "math"


class MATH(Preprocessor[MATHOptions]):
    """Problem and worked solution."""

    rl_columns = ("problem", "solution")
    sft_columns = ("problem", "solution")

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """The answer is the ground truth; what is known of the problem is kept."""
        given = columns.get("answer")
        if given is None:
            answer = last_boxed(check_text(columns.get("solution"), "solution"))
        else:
            answer = text_answer(given, "answer")
        return RLRow(
            self.options.data_source,
            (self._problem(columns),),
            "math",
            RewardModel("rule", answer),
            {name: columns[name] for name in _KEPT if columns.get(name) is not None},
        )

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """The worked solution as it is: it already boxes its answer."""
        solution = check_text(columns.get("solution"), "solution")
        last_boxed(solution)
        return SFTRow(
            (self._problem(columns), Message("assistant", solution.strip())),
            self.options.data_source,
        )

    def _problem(self, columns: Mapping[str, Any]) -> Message:
        problem = check_text(columns.get("problem"), "problem").strip()
        return Message("user", "\n".join(filter(None, (problem, self.options.instruction))))


def last_boxed(solution: str) -> str:
    """Content of the last `\\boxed{...}` (or `\\boxed x`, `\\fbox{...}`), braces matched.

    Args:
        solution: a worked solution.

    Returns:
        The answer without white space around it.

    Raises:
        RowError: there is none, it is not closed, or it is empty.
    """
    start, command = max((solution.rfind(command), command) for command in _COMMANDS)
    if start < 0:
        raise RowError("solution has no \\boxed{} answer")
    rest = solution[start + len(command) :]
    if rest.startswith(" "):
        content = rest.strip().split("$")[0].split()[:1]
        answer = content[0] if content else ""
    else:
        answer = _braced(rest)
    if not answer.strip():
        raise RowError("the last \\boxed{} of the solution is empty")
    return answer.strip()


def _braced(text: str) -> str:
    """Content of the braces that `text` starts with; `\\{` and `\\}` do not count."""
    depth, place = 0, 0
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            break
        place += 1
    if depth or not text.startswith("{") or place >= len(text):
        raise RowError("the last \\boxed of the solution has no closing brace")
    return text[1:place]
