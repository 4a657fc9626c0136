"""Mathematical equality, checked on answers whose value is known."""

import pytest

from engines.rewards.math import compute_score
from engines.rewards.text_rules import Extraction

RIGHT = [
    ("so \\boxed{\\frac{1}{2}}", "0.5"),
    ("The answer is 18.", "18"),
    ("I first thought 3, but \\boxed{4}", "4"),
    ("\\boxed{1,000}", "1000"),
    ("\\boxed{(1, 2)}", "(1,2)"),
    ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}"),
    ("\\boxed{x^2 + 2x + 1}", "(x+1)^2"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
    ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}"),
    ("#### 72", 72),
    ("it is $\\boxed{50\\%}$", "50\\%"),
]
WRONG = [
    ("\\boxed{5}", "4"),
    ("I have no idea", "4"),
    ("", "4"),
    ("\\boxed{", "4"),
    ("\\boxed{\\frac{1}{3}}", "0.3"),
    ("\\boxed{(2, 1)}", "(1,2)"),
    ("$$$$ \\frac{", "4"),
]


@pytest.mark.parametrize(("solution", "truth"), RIGHT)
def test_right_answers(solution: str, truth: str) -> None:
    assert compute_score("d", solution, truth)["score"] == 1.0


@pytest.mark.parametrize(("solution", "truth"), WRONG)
def test_wrong_and_unreadable_answers_earn_zero(solution: str, truth: str) -> None:
    assert compute_score("d", solution, truth)["score"] == 0.0


@pytest.mark.parametrize("truth", ["", "  ", None, True, ["1"]])
def test_an_unreadable_ground_truth_is_an_error_and_not_a_zero(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("d", "\\boxed{4}", truth)


@pytest.mark.parametrize(
    ("extraction", "solution", "score"),
    [
        ("boxed", "18, no: \\boxed{17}", 0.0),
        ("boxed", "\\boxed{\\frac{36}{2}} and 17", 1.0),
        ("boxed", "18", 0.0),
        ("boxed", "\\boxed{}", 0.0),
        ("hash", "\\boxed{17}\n#### 18.0", 1.0),
        ("hash", "18", 0.0),
        ("answer", "17\nAnswer: $\\frac{36}{2}$\n17", 1.0),
        ("answer", "\\boxed{18}", 0.0),
        ("last_number", "17 and then 18.", 1.0),
        ("last_number", "18 and then 17", 0.0),
        ("any", "17, no: \\boxed{18}", 1.0),
    ],
)
def test_an_answer_counts_where_it_is_asked_for(
    extraction: Extraction, solution: str, score: float
) -> None:
    assert compute_score("d", solution, "18", extraction=extraction)["score"] == score


def test_says_what_it_read() -> None:
    assert compute_score("d", r"\boxed{\dfrac12}", "0.5")["pred"] == r"\frac{1}{2}"
    assert compute_score("d", "", "1")["pred"] is None
