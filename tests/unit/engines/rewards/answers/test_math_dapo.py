"""DAPO's rule: `Answer:`, 1 or -1."""

from functools import partial

import pytest

from engines.rewards.text_rules import math_dapo

RIGHT = {"score": 1.0, "acc": 1.0}
WRONG = {"score": -1.0, "acc": 0.0}


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("Answer: 34", "34", RIGHT),
        ("answer : $34$", 34, RIGHT),
        ("Answer: x = 1,034", "1034", RIGHT),
        ("Answer: 33\nAnswer: 34", "34", RIGHT),
        (r"\boxed{34}", "34", WRONG),
        ("Answer: 34" + "\n" * 300, "34", WRONG),
        ("Answer: [INVALID]", "34", WRONG),
        ("", "34", WRONG),
    ],
)
def test_scores(solution: str, truth: object, score: dict[str, float]) -> None:
    found = math_dapo("d", solution, truth)
    found.pop("pred")
    assert found == score


def test_a_strict_box_is_compared_as_text() -> None:
    strict = partial(math_dapo, "d", ground_truth="34", strict_box_verify=True)
    assert strict(r"\boxed{34}") == {**RIGHT, "pred": "34"}
    assert strict(r"\boxed{34.0}") == {**WRONG, "pred": "34.0"}
    assert strict(r"\boxed{34}" + "x" * 100) == {**WRONG, "pred": None}


def test_says_the_form_that_was_compared() -> None:
    assert math_dapo("d", "Answer: $1,034$", "34")["pred"] == "1034"
    assert math_dapo("d", "none", "34")["pred"] is None
