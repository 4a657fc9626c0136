"""Micro-batches: every token once, under the budget, the same each time."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.training.step.micro_batches import cut, filler, plan_micro_batches
from engines.types import TokenBatch

lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(
    lengths=lengths_strategy,
    max_tokens=st.integers(8, 200),
    min_num=st.integers(1, 12),
    quadratic=st.sampled_from([None, 0.0, 0.1, 5.0]),
)
def test_plan(lengths: list[int], max_tokens: int, min_num: int, quadratic: float | None) -> None:
    costs = None if quadratic is None else [n + quadratic * n * n for n in lengths]
    plan = plan_micro_batches(lengths, max_tokens, min_num, costs=costs)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert plan == plan_micro_batches(list(lengths), max_tokens, min_num, costs=costs)
    assert len(plan) >= min(min_num, len(lengths))
    assert all(part for part in plan)
    for part in plan:
        sizes = [lengths[i] for i in part]
        assert sizes == sorted(sizes)
        assert sum(sizes) <= max_tokens or len(part) == 1
    loads = [sum((costs or lengths)[i] for i in part) for part in plan]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(loads))
    # First fit leaves no two bins that could be one, so their number is below this.
    enough = 2 * sum(lengths) / max_tokens + 1 + sum(n > max_tokens for n in lengths)
    assert len(plan) <= max(min_num, enough)


def test_tokens_are_balanced_by_default() -> None:
    plan = plan_micro_batches([8, 7, 6, 5, 4, 3, 2, 1], 25)
    assert [sum([8, 7, 6, 5, 4, 3, 2, 1][i] for i in part) for part in plan] == [18, 18]


def test_costs_are_balanced_under_the_token_budget() -> None:
    # Quadratic costs: the 8 costs 64, as much as both 4s (16 each) and the eight 2s (4 each).
    lengths = [8, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    plan = plan_micro_batches(lengths, 24, costs=[n * n for n in lengths])
    assert sorted(sorted(lengths[i] for i in part) for part in plan) == [[2] * 8 + [4, 4], [8]]
    # A budget of 20 forbids those 24 tokens; the cheapest two 2s that must leave cost 8.
    plan = plan_micro_batches(lengths, 20, costs=[n * n for n in lengths])
    assert sorted(sorted(lengths[i] for i in part) for part in plan) == [
        [2, 2, 2, 2, 2, 2, 4, 4],
        [2, 2, 8],
    ]


def test_equal_lengths_group_together_and_min_num_is_honoured() -> None:
    assert plan_micro_batches([2, 9, 2, 9, 2, 9], 30) == [[0, 2, 4, 3], [1, 5]]
    assert sorted(map(len, plan_micro_batches([5] * 4, 100, min_num=3))) == [1, 1, 2]
    assert plan_micro_batches([5, 5], 100, min_num=3) == [[0], [1]]
    assert plan_micro_batches([], 8) == []


def test_micro_batches_are_ordered_by_cost_to_align_the_ranks() -> None:
    plan = plan_micro_batches([3, 30, 4, 4], 30)
    assert [sum([3, 30, 4, 4][i] for i in part) for part in plan] == [11, 30]


@given(lengths=lengths_strategy, max_tokens=st.integers(8, 200), data=st.data())
def test_cut_keeps_every_token_and_its_columns(
    lengths: list[int], max_tokens: int, data: st.DataObject
) -> None:
    ids = [[100 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    batch = TokenBatch.from_sequences(ids, weight=[[float(x) for x in row] for row in ids])
    plan = data.draw(
        st.permutations(range(len(lengths))).map(
            lambda p: [list(p[: len(p) // 2]), list(p[len(p) // 2 :])]
        )
    )
    seen = torch.zeros(batch.num_tokens)
    for micro, sequences in zip(cut(batch, plan), plan, strict=True):
        assert micro.token_index_T is not None
        assert micro.batch.input_ids_T.tolist() == [x for i in sequences for x in ids[i]]
        assert micro.batch.lengths_B.tolist() == [lengths[i] for i in sequences]
        assert torch.equal(batch.input_ids_T[micro.token_index_T], micro.batch.input_ids_T)
        assert torch.equal(micro.batch.columns["weight"], micro.batch.input_ids_T.float())
        seen[micro.token_index_T] += 1
    assert (seen == 1).all()


def test_a_filler_trains_on_nothing() -> None:
    batch = TokenBatch.from_sequences(
        [[1, 2, 3], [4, 5]], loss_mask=[[0, 1, 1], [0, 1]], advantages=[[0, 2, 2], [0, 3]]
    )
    micro = filler(batch)
    assert micro.token_index_T is None
    assert micro.batch.input_ids_T.tolist() == [4, 5]
    assert micro.batch.columns["loss_mask"].tolist() == [0, 0]
    assert micro.batch.columns["advantages"].tolist() == [0, 3]
