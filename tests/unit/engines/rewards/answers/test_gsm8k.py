"""verl's rule for GSM8K, by a table worked out by hand."""

from typing import Any

import pytest

from engines.rewards.text_rules import gsm8k

TABLE = [
    # solution, truth, strict, flexible
    ("#### 72", "72", 1.0, 1.0),
    ("so it is\n#### 1,234", "1234", 1.0, 0.0),
    ("#### 3\n#### 4", "4", 1.0, 1.0),
    ("#### -5", "-5", 1.0, 1.0),
    ("#### 5.", "5", 0.0, 0.0),
    ("####5", "5", 0.0, 1.0),
    ("#### $5", "5", 0.0, 1.0),
    ("it is 72 .", "72", 0.0, 1.0),
    ("no number", "72", 0.0, 0.0),
    ("10-5", "-5", 0.0, 1.0),
    ("", "72", 0.0, 0.0),
    ("#### 72" + "x" * 300, "72", 0.0, 0.0),
]


@pytest.mark.parametrize(("solution", "truth", "strict", "flexible"), TABLE)
def test_both_methods(solution: str, truth: str, strict: float, flexible: float) -> None:
    assert gsm8k("d", solution, truth)["score"] == strict
    assert gsm8k("d", solution, truth, method="flexible")["score"] == flexible


def test_a_wrong_number_in_the_right_place_may_earn_something() -> None:
    options: dict[str, Any] = {"format_score": 0.1, "score": 2.0}
    assert gsm8k("d", "#### 1", 72, **options) == {"score": 0.1, "acc": 0.0, "pred": "1"}
    assert gsm8k("d", "#### 72", 72, **options) == {"score": 2.0, "acc": 1.0, "pred": "72"}
    assert gsm8k("d", "72", 72, **options) == {"score": 0.0, "acc": 0.0, "pred": None}
