r"""Reward `math_dapo`: DAPO's rule (arXiv:2503.14476), `Answer:` in Minerva's form, 1 or -1.

Promises: the scores that users of verl know for `math_dapo` and the AIME sets.
Does not promise: to see equal mathematics in other forms; reward `math` does.
"""

from collections.abc import Mapping
from typing import Any

from engines.rewards.answers.extraction import ANSWER, after_answer, boxed, truth_text
from engines.rewards.answers.normal_forms import minerva_form

_NUM_CHARACTERS = 300
"""The answer is looked for in the last ones only."""
_NUM_CHARACTERS_BOXED = 100


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    strict_box_verify: bool = False,
) -> dict[str, Any]:
    """Compare the last answer with the ground truth.

    Args:
        data_source: not used.
        solution_str: the completion.
        ground_truth: the answer, in words, numbers or LaTeX.
        extra_info: not used.
        strict_box_verify: the answer is what the last box holds, and has to be the same text.

    Returns:
        The score, 1.0, or -1.0 of a wrong answer or none; `acc`, 1 or 0; `pred`, the form that was
        compared.

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
