r"""The last box in the form of MATH."""

import pytest

from engines.rewards.text_rules import math_boxed


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
        (r"\boxed{1/2}", "0.5", 1.0),
        (r"\boxed{3} or \boxed{4}", "4", 1.0),
        (r"\boxed{4", "4", 0.0),
        ("4", "4", 0.0),
        (r"\boxed{2+2}", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
    ],
)
def test_scores(solution: str, truth: str, score: float) -> None:
    assert math_boxed("d", solution, truth)["score"] == score


def test_no_ground_truth_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="the ground truth is empty"):
        math_boxed("d", r"\boxed{}", " ")


def test_says_the_form_that_was_compared() -> None:
    assert math_boxed("d", r"\boxed{\frac12}", "1")["pred"] == r"\frac{1}{2}"
    assert math_boxed("d", "none", "1")["pred"] is None
