r"""Reward `math_boxed`: verl's rule for MATH, the last `\boxed{}` in that data set's normal form.

Promises verl's scores for `lighteval/MATH` and similar sets, except that the last `\boxed` precedes
every `\fbox`, and a brace behind a backslash closes no box.
"""

from collections.abc import Mapping
from typing import Any

from engines.rewards.answers.extraction import ANSWER, boxed, math_form, truth_text


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `score`, 1.0 or 0.0, and `pred`, the normal form of the boxed answer.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    del data_source, extra_info
    truth = truth_text(ground_truth)
    answer = boxed(solution_str)
    form = None if answer is None else math_form(answer)
    return {"score": float(form == math_form(truth)), ANSWER: form}
