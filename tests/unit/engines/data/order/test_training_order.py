"""A section `order` leads to its order; without one, to the order that there always was."""

from collections import Counter
from typing import Any

import pytest

from engines.config.data import OrderConfig
from engines.data.order import (
    Band,
    BandedOrder,
    Order,
    ResumableOrder,
    VisitedRow,
    order_of,
)
from infra.errors import ConfigError

LEVELS = (3, 1, 2, 1, 3, 2)
ROWS = [
    VisitedRow("ab"[place % 2], 10 - place, {"level": level}) for place, level in enumerate(LEVELS)
]


def order(batch_size: int = 4, rows: list[VisitedRow] = ROWS, **section: Any) -> Order:
    config = OrderConfig.model_validate(section)
    return order_of(config, rows, batch_size, 5, path="rl.order")


def test_the_default_is_the_order_of_a_number_of_rows() -> None:
    assert order() == ResumableOrder(num_rows=6, batch_size=4, seed=5)


def test_difficulty_is_a_key_or_the_number_of_tokens() -> None:
    levels = tuple(map(float, LEVELS))
    by_level = ResumableOrder(num_rows=6, batch_size=4, seed=5, difficulty=levels)
    assert order(kind="ascending", difficulty="level") == by_level
    assert order(6, kind="ascending").batch(0) == [5, 4, 3, 2, 1, 0]


def test_bands_open_at_their_step_and_the_last_holds_the_rest() -> None:
    bands = [{"max_difficulty": 1}, {"first_step": 2}]
    banded = order(2, kind="banded", difficulty="level", bands=bands)
    assert isinstance(banded, BandedOrder)
    assert banded.bands == (Band(1.0, 0), Band(3.0, 2))
    assert [sorted(banded.batch(step)) for step in (0, 1)] == [[1, 3], [1, 3]]
    assert sorted(row for step in (2, 3, 4) for row in banded.batch(step)) == [0, 1, 2, 3, 4, 5]
    # Two passes over the two rows of the first band, then one third of a pass over six.
    assert [banded.epoch(step) for step in (0, 1, 2, 3)] == pytest.approx([0, 1, 2, 2 + 1 / 3])


def test_weights_hold_among_rows_of_sources_that_alternate() -> None:
    mixed = order(4, weights={"b": 1, "a": 3})
    visited = [row for step in range(6) for row in mixed.batch(step)]
    assert Counter(ROWS[row].data_source for row in visited) == {"a": 18, "b": 6}
    # 18 visits of the three rows 0, 2, 4, and 6 of 1, 3, 5: each row as often as its neighbours.
    assert Counter(visited) == {0: 6, 2: 6, 4: 6, 1: 2, 3: 2, 5: 2}
    assert mixed.batch(3) == order(4, weights={"a": 3, "b": 1}).batch(3)
    assert mixed.epoch(3) == 2.0


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"weights": {"a": 1}}, r"^rl\.order\.weights: got a; need .* for no other: a, b"),
        ({"weights": {"a": 1, "b": 1e-9}}, r"^rl\.order\.weights: .* need at most"),
        (
            {"kind": "banded", "bands": [{"max_difficulty": 4}, {"first_step": 1}]},
            r"^rl\.order\.bands: got 4\.0 to 10\.0; need a row in the first",
        ),
        (
            {"kind": "ascending", "difficulty": "grade"},
            r"^rl\.order\.difficulty: got grade, which is None in extra_info of row 0",
        ),
    ],
)
def test_rows_that_an_order_does_not_fit(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        order(**section)
