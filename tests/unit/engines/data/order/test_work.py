"""What a batch costs, in sorts and walks over all rows, and that what is kept changes no batch."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.data.order import Band, BandedOrder, MixedOrder, Order, ResumableOrder

NUM_SOURCES = 20


def shuffled(num_rows: int, batch_size: int, seed: int) -> Order:
    return ResumableOrder(num_rows=num_rows, batch_size=batch_size, seed=seed)


def mixed(num_rows: int, batch_size: int, seed: int) -> Order:
    """Of more sources than any cache of all orders together would hold."""
    share = max(1, num_rows // NUM_SOURCES)
    return MixedOrder(
        groups=tuple(tuple(range(n * share, (n + 1) * share)) for n in range(NUM_SOURCES)),
        weights=tuple(range(1, NUM_SOURCES + 1)),
        batch_size=batch_size,
        seed=seed,
    )


def difficulty(num_rows: int) -> tuple[float, ...]:
    return tuple(float(7 * row % 5) for row in range(num_rows))


def ascending(num_rows: int, batch_size: int, seed: int) -> Order:
    return ResumableOrder(
        num_rows=num_rows, batch_size=batch_size, seed=seed, difficulty=difficulty(num_rows)
    )


def banded(num_rows: int, batch_size: int, seed: int) -> Order:
    bands = (Band(0.0, 0), Band(2.0, 3), Band(4.0, 7))
    return BandedOrder(
        difficulty=difficulty(num_rows), bands=bands, batch_size=batch_size, seed=seed
    )


ORDERS = [shuffled, mixed, ascending, banded]
Make = Callable[[int, int, int], Order]


@pytest.mark.parametrize("make", ORDERS)
@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 2**63), st.randoms())
def test_steps_asked_in_any_order_are_those_asked_in_sequence(
    make: Make, num_rows: int, batch_size: int, seed: int, random: Any
) -> None:
    steps = [*range(25), *range(25), 10_000]
    random.shuffle(steps)
    asked = make(num_rows, batch_size, seed)
    for step in steps:
        alone = make(num_rows, batch_size, seed)
        assert asked.batch(step) == alone.batch(step)
        assert asked.epoch(step) == alone.epoch(step)
    assert asked == make(num_rows, batch_size, seed), "what is kept is no field"


@pytest.mark.parametrize(
    ("make", "most"),
    # Each of 2,000 rows once or twice; of bands, three sets of open rows.
    [(shuffled, 2), (mixed, 2 * NUM_SOURCES), (ascending, 4), (banded, 3 * 2)],
)
def test_hundred_batches_need_few_sorts_and_row_scans(
    make: Make, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, calls, size = make(2_000, 8, 0), Counter[str](), 2_000 // NUM_SOURCES

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(np, name)

        def call(values: Any, *arguments: Any, **options: Any) -> Any:
            calls[name] += len(values) >= size
            return plain(values, *arguments, **options)

        return call

    for name in ("argsort", "asarray", "flatnonzero"):
        monkeypatch.setattr(np, name, counted(name))
    for step in range(100):
        order.batch(step)
        order.epoch(step)
    assert calls["argsort"] <= most
    assert calls["asarray"] <= 1
    assert calls["flatnonzero"] <= 6
