"""Batches: what belongs to tokens, to sequences and to units, and how it is cut and counted."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.controller.worker_group import split_plan, take
from engines.training.step.micro_batches import cut, filler, loss_counts, plan_micro_batches
from engines.types import TokenBatch


def test_what_belongs_to_a_sequence_stays_with_it() -> None:
    batch = TokenBatch(
        torch.arange(6),
        torch.tensor([0, 2, 3, 6], dtype=torch.int32),
        {"top_ids": torch.arange(12).reshape(6, 2), "loss_mask": torch.ones(6)},
        rows={"truncated": torch.tensor([True, False, True]), "scores": torch.eye(3)},
        unit_B=torch.tensor([4, 9, 4]),
    )
    assert batch.units == [[0, 2], [1]]
    chosen = batch.select([2, 0])
    assert chosen.input_ids_T.tolist() == [3, 4, 5, 0, 1]
    assert chosen.cu_seqlens.tolist() == [0, 3, 5]
    assert chosen.cu_seqlens.dtype == torch.int32
    assert chosen.columns["top_ids"].tolist() == [[6, 7], [8, 9], [10, 11], [0, 1], [2, 3]]
    assert chosen.columns["top_ids"].dtype == torch.int64
    assert chosen.rows["truncated"].tolist() == [True, True]
    assert chosen.rows["scores"].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert chosen.units == [[0, 1]]
    assert chosen.to("cpu").unit_B is not None
    for apart in ([0], [0, 1], [0, 2, 2]):
        with pytest.raises(ValueError, match=r"taken apart or repeated: \[4\]|: \[\]"):
            batch.select(apart)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"columns": {"x": torch.ones(3, 2)}}, r"column x: \(3, 2\); need \(4,\) or \(4, K\)"),
        ({"columns": {"x": torch.ones(4, 2, 2)}}, "column x"),
        ({"rows": {"x": torch.ones(4)}}, r"row x: \(4,\); need \(2,\) or \(2, K\)"),
        ({"unit_B": torch.ones(3, dtype=torch.int64)}, "unit_B"),
    ],
)
def test_shapes_that_do_not_fit(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatch(torch.arange(4), torch.tensor([0, 1, 4], dtype=torch.int32), **given)


def batch_of(lengths: Sequence[int], units: Sequence[int]) -> TokenBatch:
    """Sequence i has tokens 100 i, 100 i + 1, ..., of which all but the first are trained on."""
    ids = [[100 * i + t for t in range(length)] for i, length in enumerate(lengths)]
    made = TokenBatch.from_sequences(ids, loss_mask=[[0, *[1] * (n - 1)] for n in lengths])
    unit_B = torch.tensor(units, dtype=torch.int64)
    return TokenBatch(made.input_ids_T, made.cu_seqlens, made.columns, unit_B=unit_B)


PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=14)


@given(PAIRS, st.integers(20, 60), st.integers(1, 5))
def test_units_stay_together_however_a_batch_is_cut(
    pairs: list[tuple[int, int]], max_tokens: int, num_parts: int
) -> None:
    lengths, units = [p[0] for p in pairs], [p[1] for p in pairs]
    batch = batch_of(lengths, units)
    plans = [
        plan_micro_batches(lengths, max(max_tokens, sum(lengths)), num_parts, units=batch.units),
        [part for part in split_plan(batch, num_parts) if part],
    ]
    for plan in plans:
        assert sorted(i for part in plan for i in part) == list(range(len(pairs)))
        for part in plan:
            assert not {units[i] for i in part} & {
                units[i] for i in range(len(pairs)) if i not in part
            }
    assert len(plans[0]) == min(num_parts, len(set(units)))
    for micro, part in zip(cut(batch, plans[0]), plans[0], strict=True):
        assert micro.token_index_T is not None
        assert torch.equal(micro.batch.input_ids_T, batch.input_ids_T[micro.token_index_T])
        assert micro.batch.unit_B is not None
        assert micro.batch.unit_B.tolist() == [units[i] for i in part]


def test_the_budget_is_that_of_whole_units() -> None:
    assert plan_micro_batches([4, 4, 4, 4], 8, units=[[0, 3], [1, 2]]) == [[0, 3], [1, 2]]
    # One that exceeds it stands alone, for `prepare` to refuse.
    assert plan_micro_batches([1, 4, 4, 4], 11, units=[[0], [1, 2, 3]]) == [[0], [1, 2, 3]]


def test_a_filler_is_a_whole_unit() -> None:
    batch = batch_of([2, 5, 2, 3], [0, 1, 0, 2])
    for made in (filler(batch).batch, take(batch, [])):
        assert made.input_ids_T.tolist() == [300, 301, 302]
        assert not made.columns["loss_mask"].any()


def test_unit_counts_if_any_of_its_sequences_is_trained() -> None:
    batch = batch_of([2, 1, 3, 1], [7, 7, 8, 9])
    assert loss_counts(batch) == (3, 2, 2)
    assert loss_counts(batch.select([0, 1])) == (1, 1, 1)
    alone = TokenBatch(batch.input_ids_T, batch.cu_seqlens, batch.columns)
    assert loss_counts(alone) == (3, 2, 2)
