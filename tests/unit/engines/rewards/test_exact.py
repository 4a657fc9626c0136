"""Exact match."""

from typing import Any

import pytest

from engines.rewards.text_rules import exact


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("640", "640", 1.0),
        (" 640\n", "640", 1.0),
        ("a  b", "a b", 1.0),
        ("0640", "640", 0.0),
        ("640 ", "64", 0.0),
        ("", "640", 0.0),
        ("7", 7, 1.0),
        ("blue", ["red", "blue"], 1.0),
        ("green", ["red", "blue"], 0.0),
    ],
)
def test_scores(solution: str, truth: Any, score: float) -> None:
    assert exact("d", solution, truth)["score"] == score


def test_only_what_follows_the_last_delimiter_counts() -> None:
    assert exact("d", "640;140", "140", {"answer_delimiter": ";"})["score"] == 1.0
    assert exact("d", "140;640", "140", {"answer_delimiter": ";"})["score"] == 0.0
    assert exact("d", "140", "140", {"answer_delimiter": ";"})["score"] == 1.0
    assert exact("d", "x #### 5", "5", answer_delimiter="####")["score"] == 1.0


def test_case() -> None:
    assert exact("d", "Yes", "yes")["score"] == 0.0
    assert exact("d", "Yes", "yes", ignore_case=True)["score"] == 1.0


@pytest.mark.parametrize("truth", [None, "", " ", [], ["", "a"], True, {"target": "x"}])
def test_a_ground_truth_that_is_none_is_an_error_and_not_a_zero(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        exact("d", "x", truth)


def test_says_what_was_compared() -> None:
    assert exact("d", " so ####  Yes  Sir ", "x", answer_delimiter="####")["pred"] == "Yes Sir"
    assert exact("d", "Yes", "x", ignore_case=True)["pred"] == "yes"
