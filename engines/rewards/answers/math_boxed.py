r"""Reward `math_boxed`: verl's rule for MATH, the last `\boxed{}` in the form of that data set.

Promises: the scores that users of verl know for `lighteval/MATH` and its like. Two departures: of
several boxes of both spellings the last counts, and a brace behind a backslash closes none.
Does not promise: to see equal mathematics in other forms; reward `math` does.
"""

from collections.abc import Mapping
from typing import Any

from engines.rewards.answers.extraction import ANSWER, boxed, truth_text
from engines.rewards.answers.normal_forms import math_form


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compare what is boxed with the ground truth.

    Args:
        data_source: not used.
        solution_str: the completion.
        ground_truth: LaTeX without a box, or a number.
        extra_info: not used.

    Returns:
        The score, 1.0 or 0.0; `pred`, the form that was compared.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    del data_source, extra_info
    truth = truth_text(ground_truth)
    answer = boxed(solution_str)
    form = None if answer is None else math_form(answer)
    return {"score": float(form == math_form(truth)), ANSWER: form}
