"""Aggregation modes by hand, and their independence of how the batch is cut."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.algorithms.aggregation import aggregate, masked_sum
from engines.types import GlobalCounts, TokenBatch

MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

# Two sequences: prompt token, then trained tokens with losses (1, 2) and (6).
BATCH = TokenBatch.from_sequences(
    [[5, 6, 7], [5, 6]], loss=[[100, 1, 2], [100, 6]], loss_mask=[[0, 1, 1], [0, 1]]
)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", 9 / 3),
        ("token-sum", 9.0),
        ("seq-mean-token-sum", (3 + 6) / 2),
        ("seq-mean-token-mean", (1.5 + 6) / 2),
        ("seq-mean-token-sum-norm", (3 + 6) / 2 / 10),
    ],
)
def test_by_hand(mode, want):
    got = aggregate(
        BATCH.columns["loss"], BATCH.columns["loss_mask"] > 0, BATCH, GlobalCounts(3, 2), mode, 10.0
    )
    assert got.item() == pytest.approx(want)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 7), st.sampled_from(MODES))
def test_any_split_in_any_order_adds_up_to_the_same(seed, num_splits, mode):
    source = random.Random(seed)
    lengths = [source.randint(1, 6) for _ in range(9)]
    batch = TokenBatch.from_sequences(
        [[1] * n for n in lengths],
        loss=[[source.uniform(-3, 3) for _ in range(n)] for n in lengths],
        loss_mask=[[0] + [source.randint(0, 1) for _ in range(n - 1)] for n in lengths],
    )
    masks = [batch.select([i]).columns["loss_mask"] for i in range(9)]
    counts = GlobalCounts(int(sum(m.sum() for m in masks)), sum(int(m.any()) for m in masks))

    def share(part: TokenBatch) -> float:
        columns = part.columns
        return aggregate(columns["loss"], columns["loss_mask"] > 0, part, counts, mode, 4.0).item()

    order = source.sample(range(9), 9)
    splits = [order[i::num_splits] for i in range(num_splits)]
    assert sum(share(batch.select(s)) for s in splits) == pytest.approx(share(batch), abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_on_is_zero_with_a_zero_gradient(mode):
    values_T = torch.ones(5, requires_grad=True)
    mask_T = torch.zeros(5, dtype=torch.bool)
    loss = aggregate(values_T, mask_T, BATCH, GlobalCounts(0, 0), mode, 10.0)
    loss.backward()
    assert loss.item() == 0.0
    assert values_T.grad is not None
    assert torch.equal(values_T.grad, torch.zeros(5))


def test_infinity_outside_the_mask_is_harmless():
    values_T = torch.tensor([float("inf"), 2.0, float("nan")])
    assert masked_sum(values_T, torch.tensor([False, True, False])).item() == 2.0
