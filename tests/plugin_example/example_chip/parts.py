"""A rollout engine, a reward and a preprocessor."""

from collections.abc import Mapping
from typing import Any

from engines.config.options import NoOptions
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.read.rows import Message, RewardModel, RLRow, SFTRow, check_text
from engines.rollout.transformers.engine import TransformersEngine


class ExampleRollout(TransformersEngine):
    """The engine of this project under another name; a real one implements `RolloutEngine`."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """1 if the completion ends with the ground truth, else 0."""
    answer = str(ground_truth).strip()
    return float(solution_str.split()[-1:] == [answer])


class Flashcards(Preprocessor[NoOptions]):
    """Columns `front` and `back`."""

    rl_columns = ("front", "back")
    sft_columns = ("front", "back")

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """The front as prompt, the back as ground truth."""
        back = check_text(columns.get("back"), "back")
        return RLRow("flashcards", (self._front(columns),), "recall", RewardModel("rule", back))

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """The front as prompt, the back as the assistant's message."""
        back = Message("assistant", check_text(columns.get("back"), "back"))
        return SFTRow((self._front(columns), back), "flashcards")

    def _front(self, columns: Mapping[str, Any]) -> Message:
        return Message("user", check_text(columns.get("front"), "front"))
