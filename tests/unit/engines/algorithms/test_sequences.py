"""From tokens to sequences and back: worked by hand, and as loops over plain lists."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.algorithms.sequences import (
    TrainedTokens,
    masked_whiten,
    mean_by_sequence,
    num_trained_B,
    on_last_token,
    sum_by_sequence,
)
from engines.types import TokenBatch

SIZES = st.one_of(st.integers(-9, 9).map(float), st.floats(-2, 2), st.floats(-1e6, 1e6))
Sequences = list[list[tuple[bool, float]]]
SEQUENCES = st.lists(
    st.lists(st.tuples(st.booleans(), SIZES), min_size=1, max_size=7), min_size=1, max_size=6
)
"""For each token whether it is trained, and a number."""


def packed(step: Sequences) -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
    """The batch, its mask and its numbers."""
    tokens = [token for own in step for token in own]
    batch = TokenBatch.from_sequences([[1] * len(own) for own in step])
    mask_T = torch.tensor([trained for trained, _ in tokens])
    return batch, mask_T, torch.tensor([value for _, value in tokens], dtype=torch.float64)


# Numbers 1 to 6; trained: 2 and 4 of the first, none of the second, 6 of the third.
BATCH, MASK_T, VALUES_T = packed(
    [[(False, 1), (True, 2), (False, 3), (True, 4)], [(False, 5)], [(True, 6)]]
)


def test_by_hand() -> None:
    assert sum_by_sequence(VALUES_T, BATCH).tolist() == [10, 5, 6]
    assert num_trained_B(BATCH, MASK_T).tolist() == [2, 0, 1]
    assert mean_by_sequence(VALUES_T, MASK_T, BATCH).tolist() == [3, 0, 6]
    on_last_T = on_last_token(torch.tensor([7.0, 8.0, 9.0]), MASK_T, BATCH)
    assert on_last_T.tolist() == [0, 0, 0, 7, 0, 9]


def test_trained_tokens_are_rows_of_a_matrix_by_hand() -> None:
    tokens = TrainedTokens(MASK_T, BATCH)
    assert tokens.mask_BL.tolist() == [[True, True], [False, False], [True, False]]
    assert tokens.matrix(VALUES_T).tolist() == [[2, 4], [0, 0], [6, 0]]
    back_T = tokens.column(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert back_T.tolist() == [0, 1, 0, 2, 0, 5]


def test_whitening_by_hand() -> None:
    # 2, 4 and 6 less 4: -2, 0, 2, of the variance 8 / 2 = 4.
    assert masked_whiten(VALUES_T, MASK_T).tolist() == pytest.approx([0, -1, 0, 0, 0, 1])
    # The eps stands inside the root: 1e-4 for 0 and 2e-4, whose variance is 2e-8.
    pair_T = torch.tensor([0.0, 2e-4], dtype=torch.float64)
    both_T = torch.tensor([True, True])
    assert masked_whiten(pair_T, both_T)[1].item() == pytest.approx(1e-4 / math.sqrt(3e-8))
    assert masked_whiten(pair_T, both_T, eps=0.0)[1].item() == pytest.approx(math.sqrt(0.5))


def test_a_mean_has_a_gradient_on_trained_tokens_alone() -> None:
    values_T = VALUES_T.clone().requires_grad_()
    mean_by_sequence(values_T, MASK_T, BATCH).sum().backward()
    assert values_T.grad is not None
    assert values_T.grad.tolist() == [0, 0.5, 0, 0.5, 0, 1]


def test_numbers_of_untrained_tokens_are_never_looked_at() -> None:
    values_T = torch.where(MASK_T, VALUES_T, torch.nan)
    assert mean_by_sequence(values_T, MASK_T, BATCH).tolist() == [3, 0, 6]
    assert masked_whiten(values_T, MASK_T).tolist() == pytest.approx([0, -1, 0, 0, 0, 1])
    assert TrainedTokens(MASK_T, BATCH).matrix(values_T).tolist() == [[2, 4], [0, 0], [6, 0]]


def test_sums_are_in_float64_where_the_values_are() -> None:
    """In float32 the ones would be lost: 2^24 + 1 is 2^24."""
    batch, _, values_T = packed([[(True, 2.0**24), (True, 1.0), (True, 1.0)]])
    assert sum_by_sequence(values_T, batch).tolist() == [2.0**24 + 2]
    assert mean_by_sequence(values_T.float(), values_T > 0, batch).dtype == torch.float32


@given(step=SEQUENCES)
def test_sums_and_means_agree_with_plain_lists(step: Sequences) -> None:
    batch, mask_T, values_T = packed(step)
    kept = [[value for trained, value in own if trained] for own in step]
    sums = [math.fsum(value for _, value in own) for own in step]
    means = [statistics.fmean(own) if own else 0.0 for own in kept]
    assert sum_by_sequence(values_T, batch).tolist() == pytest.approx(sums, abs=1e-8)
    assert num_trained_B(batch, mask_T).tolist() == [len(own) for own in kept]
    assert mean_by_sequence(values_T, mask_T, batch).tolist() == pytest.approx(means, abs=1e-8)


@given(step=SEQUENCES)
def test_the_matrix_of_trained_tokens_and_back(step: Sequences) -> None:
    batch, mask_T, values_T = packed(step)
    tokens = TrainedTokens(mask_T, batch)
    kept = [[value for trained, value in own if trained] for own in step]
    longest = max(map(len, kept))
    want = [own + [0.0] * (longest - len(own)) for own in kept]
    assert tokens.matrix(values_T).tolist() == want
    assert tokens.mask_BL.tolist() == [
        [place < len(own) for place in range(longest)] for own in kept
    ]
    back = [value * trained for own in step for trained, value in own]
    assert tokens.column(tokens.matrix(values_T)).tolist() == back


@given(step=SEQUENCES)
def test_the_last_trained_token_of_each_sequence(step: Sequences) -> None:
    batch, mask_T, _ = packed(step)
    values = [float(place + 1) for place in range(len(step))]
    want = []
    for value, own in zip(values, step, strict=True):
        places = [place for place, (trained, _) in enumerate(own) if trained]
        want += [value * (places[-1:] == [place]) for place in range(len(own))]
    assert on_last_token(torch.tensor(values), mask_T, batch).tolist() == want


@given(step=SEQUENCES)
def test_whitening_agrees_with_statistics(step: Sequences) -> None:
    _, mask_T, values_T = packed(step)
    kept = [value for own in step for trained, value in own if trained]
    mean = statistics.fmean(kept) if kept else 0.0
    std = math.sqrt((statistics.variance(kept) if len(kept) > 1 else 0.0) + 1e-8)
    silent = len(set(kept)) < 2
    want = [(value - mean) / std * trained * (not silent) for own in step for trained, value in own]
    assert masked_whiten(values_T, mask_T).tolist() == pytest.approx(want, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_whitening_of_equal_values_is_exactly_zero(value: float, size: int) -> None:
    same_T = torch.full((size,), value, dtype=torch.float64)
    assert not masked_whiten(same_T, torch.ones(size, dtype=torch.bool)).any()


@settings(max_examples=40)
@given(step=SEQUENCES, seed=st.integers(0, 1000))
def test_the_order_of_sequences_does_not_matter(step: Sequences, seed: int) -> None:
    order = torch.randperm(len(step), generator=torch.Generator().manual_seed(seed)).tolist()
    batch, mask_T, values_T = packed(step)
    moved, moved_mask_T, moved_T = packed([step[place] for place in order])
    assert torch.equal(sum_by_sequence(moved_T, moved), sum_by_sequence(values_T, batch)[order])
    rows_BL = TrainedTokens(mask_T, batch).matrix(values_T)
    assert torch.equal(TrainedTokens(moved_mask_T, moved).matrix(moved_T), rows_BL[order])
