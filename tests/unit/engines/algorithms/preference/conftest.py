"""Steps of pairs, laid out as awkwardly as a batch may be."""

from collections.abc import Callable

import plain_pairs
import pytest

from engines.types import TokenBatch


@pytest.fixture(scope="session")
def make_pairs() -> Callable[..., TokenBatch]:
    """`make_pairs(sizes, seed)`: see `plain_pairs`."""
    return plain_pairs.make_pairs
