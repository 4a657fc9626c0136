"""What a reward function's return value means."""

import math
from fractions import Fraction
from hashlib import sha256

import numpy as np
import pytest

from engines.rewards.base import Score, Unscored, describe, interpret


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(False), 0.0),
        (np.array(2.0), 2.0),
        ({"score": -1}, -1.0),
    ],
)
def test_numbers_are_scores(returned: object, value: float) -> None:
    assert interpret(returned) == Score(value)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned None; need a number"),
        ("1.0", "returned a str; need a number"),
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (10**400, "returned inf"),
        ([1.0], "returned a list; need a number"),
        (np.array([1.0, 2.0]), "returned a ndarray; need a number"),
        (Fraction(1, 2), "returned a Fraction; need a number"),
        ({"acc": 1.0}, "returned a mapping without 'score'"),
        ({"score": None}, "returned None; need a number"),
        ({"score": math.nan, "acc": 1}, "returned nan"),
    ],
)
def test_anything_else_is_unscored_and_not_zero(returned: object, reason: str) -> None:
    assert interpret(returned) == Unscored(reason)


def test_extras_are_the_other_finite_numbers() -> None:
    returned = {"score": 1.0, "acc": True, "length": 3, "bad": math.nan, "pred": 42, 5: 6}
    assert interpret(returned) == Score(1.0, {"acc": 1.0, "length": 3.0, "5": 6.0})


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ({"pred": " 42 "}, "42"),
        ({"pred": None}, ""),
        ({"pred": 42}, "42"),
        ({"pred": 0.5}, "0.5"),
        ({"pred": "\ud800"}, "?"),
        ({"pred": [1, 2]}, None),
        ({"pred": "x" * 20_000}, f"sha256:{sha256(b'x' * 20_000).hexdigest()}"),
        ({}, None),
    ],
)
def test_the_answer_that_was_read_is_text(said: dict[str, object], answer: str | None) -> None:
    found = interpret({"score": 1.0, **said})
    assert isinstance(found, Score)
    assert found.answer == answer


def test_an_exception_is_one_short_line() -> None:
    assert describe(ValueError("a\n  b")) == "raised ValueError: a b"
    assert describe(KeyError()) == "raised KeyError"
    assert len(describe(ValueError("x" * 10_000))) < 250
