"""Reward `gsm8k`: verl's rule for `openai/gsm8k`, which compares the number as text.

Promises verl's scores, including its strictness: `#### 5.` is not 5, and the flexible last number
of `10-5` is -5. Reward `math` accepts equal numbers in other spellings.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from engines.rewards.answers.extraction import ANSWER, truth_text

_NUM_CHARACTERS = 300
"""Only this many last characters are searched."""
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """Return `score` (0 without a number), `acc` (1.0 or 0.0) and `pred`, the number.

    Options: see `Gsm8kOptions`.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    del data_source, extra_info
    truth = truth_text(ground_truth)
    answer = _answer(solution_str[-_NUM_CHARACTERS:], method)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, ANSWER: None}
    right = answer == truth
    return {"score": score if right else format_score, "acc": float(right), ANSWER: answer}


def _answer(text: str, method: str) -> str | None:
    if method == "strict":
        found = _STRICT.findall(text)
        return found[-1].replace(",", "") if found else None
    return next((each for each in reversed(_FLEXIBLE.findall(text)) if each != "."), None)
