"""Micro-batches: every token once, under the budget, the same each time."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.training.micro_batches import cut, filler, plan_micro_batches
from engines.types import TokenBatch

lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths=lengths_strategy, max_tokens=st.integers(8, 200), min_num=st.integers(1, 12))
def test_plan(lengths: list[int], max_tokens: int, min_num: int) -> None:
    plan = plan_micro_batches(lengths, max_tokens, min_num)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert plan == plan_micro_batches(list(lengths), max_tokens, min_num)
    assert len(plan) >= min(min_num, len(lengths))
    assert all(part for part in plan)
    for part in plan:
        sizes = [lengths[i] for i in part]
        assert sizes == sorted(sizes)
        assert sum(sizes) <= max_tokens or len(part) == 1 or sum(sizes) <= max(lengths)


def test_loads_are_balanced() -> None:
    plan = plan_micro_batches([8, 7, 6, 5, 4, 3, 2, 1], 25)
    assert plan == [[7, 6, 5, 4, 3, 2], [1, 0]]  # 21 and 15 tokens; 21 is the least


def test_equal_lengths_stay_together_and_more_parts_can_be_asked_for() -> None:
    assert plan_micro_batches([2, 9, 2, 9, 2, 9], 30) == [[0, 2, 4, 1], [3, 5]]
    assert plan_micro_batches([5] * 4, 100, min_num=3) == [[0], [1], [2, 3]]
    assert plan_micro_batches([5, 5], 100, min_num=3) == [[0], [1]]
    assert plan_micro_batches([], 8) == []


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
