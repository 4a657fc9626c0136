"""Reward `math_dapo`: DAPO's rule (arXiv:2503.14476), with verl's scores, 1 or -1."""

from collections.abc import Mapping
from typing import Any

from engines.rewards.answers.extraction import ANSWER, after_answer, boxed, minerva_form, truth_text

_NUM_CHARACTERS = 300
"""Only this many last characters are searched."""
_NUM_CHARACTERS_BOXED = 100


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    strict_box_verify: bool = False,
) -> dict[str, Any]:
    """Return `score` (1.0 or -1.0), `acc` (1.0 or 0.0) and `pred`, the form that was compared.

    Options: see `MathDapoOptions`.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    del data_source, extra_info
    truth = truth_text(ground_truth)
    if strict_box_verify:
        form = boxed(solution_str[-_NUM_CHARACTERS_BOXED:])
    else:
        answer = after_answer(solution_str[-_NUM_CHARACTERS:])
        form = None if answer is None else minerva_form(answer)
        truth = minerva_form(truth)
    right = form == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), ANSWER: form}
