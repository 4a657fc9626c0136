"""Splitting a call over ranks and putting the results back."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.controller.worker_group import (
    Dispatch,
    collect,
    dispatch,
    dispatch_mode,
    equal_result,
    split_plan,
    take,
)
from engines.errors import WorkerError
from engines.types import ModelOutputs, RolloutRequest, SamplingParams, TokenBatch, TrainMetrics
from engines.weight_sync.base import SyncReport, WeightDigest


def _batch(lengths: list[int]) -> TokenBatch:
    ids = [[10 * i + t for t in range(length)] for i, length in enumerate(lengths)]
    return TokenBatch.from_sequences(ids, loss_mask=[[1.0] * length for length in lengths])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 6))
def test_a_split_batch_comes_back_in_the_original_order(lengths: list[int], ranks: int) -> None:
    batch = _batch(lengths)
    parts = split_plan(batch, ranks)
    assert sorted(i for items in parts for i in items) == list(range(len(lengths)))
    shares = [take(batch, items) for items in parts]
    assert all(share.num_sequences >= 1 for share in shares)
    # A stand-in for a model: a value that tells tokens apart.
    results = [share.input_ids_T.float() * 2 for share in shares]
    assert torch.equal(collect(batch, parts, results), batch.input_ids_T.float() * 2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 6))
def test_outputs_of_a_model_come_back_by_tokens_and_by_sequences(
    lengths: list[int], ranks: int
) -> None:
    batch = _batch(lengths)
    parts = split_plan(batch, ranks)
    results = []
    for share in (take(batch, items) for items in parts):
        ids_T = share.input_ids_T.float()
        behind_B = share.lengths_B.float()
        of_each_TK = torch.stack([ids_T, -ids_T], dim=1)
        results.append(
            ModelOutputs(
                ids_T, values_T=-ids_T, last_values_B=behind_B, topk_logprobs_TK=of_each_TK,
                topk_ids_TK=of_each_TK.long(),
            )
        )  # fmt: skip
    found = collect(batch, parts, results)
    assert torch.equal(found.logprobs_T, batch.input_ids_T.float())
    assert torch.equal(found.values_T, -batch.input_ids_T.float())
    assert torch.equal(found.last_values_B, batch.lengths_B.float())
    wanted_TK = torch.stack([batch.input_ids_T, -batch.input_ids_T], dim=1)
    assert torch.equal(found.topk_logprobs_TK, wanted_TK.float())
    assert torch.equal(found.topk_ids_TK, wanted_TK)
    assert found.entropy_T is None


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 4))
def test_units_are_never_split(lengths: list[int], ranks: int, size: int) -> None:
    unit_B = torch.arange(len(lengths)) // size
    batch = replace(_batch(lengths), unit_B=unit_B)
    parts = split_plan(batch, ranks)
    assert sorted(i for items in parts for i in items) == list(range(len(lengths)))
    of_parts = [{int(unit_B[i]) for i in items} for items in parts]
    assert sum(map(len, of_parts)) == len(set(unit_B.tolist()))
    assert all(take(batch, items).num_sequences >= 1 for items in parts)


@given(st.lists(st.text(max_size=3), min_size=1, max_size=30), st.integers(1, 6))
def test_a_split_list_comes_back_in_the_original_order(items: list[str], ranks: int) -> None:
    parts = split_plan(items, ranks)
    results = [[text + "!" for text in take(items, part)] for part in parts]
    assert collect(items, parts, results) == [text + "!" for text in items]


def test_shares_are_balanced_by_tokens() -> None:
    parts = split_plan(_batch([100, 30, 30, 30, 10]), 2)
    loads = [sum([100, 30, 30, 30, 10][i] for i in items) for items in parts]
    assert sorted(loads) == [100, 100]


def test_requests_weigh_what_they_may_cost() -> None:
    def request(samples: int) -> RolloutRequest:
        return RolloutRequest(f"{samples}", (1,), SamplingParams(10), tuple(range(samples)))

    parts = split_plan([request(8), request(4), request(4)], 2)
    assert sorted(map(len, parts)) == [1, 2]


def test_rank_without_sequences_gets_an_untrained_filler() -> None:
    batch = _batch([5, 3])
    parts = split_plan(batch, 3)
    assert parts[-1] == []
    filler = take(batch, [])
    assert filler.input_ids_T.tolist() == [10, 11, 12]
    assert filler.columns["loss_mask"].tolist() == [0, 0, 0]
    results = [take(batch, items).input_ids_T.float() for items in parts]
    assert torch.equal(collect(batch, parts, results), batch.input_ids_T.float())


def test_a_result_that_is_equal_everywhere_is_taken_once() -> None:
    batch = _batch([2, 2])
    metrics = TrainMetrics(1.0, 2.0, 3.0, 4)
    assert collect(batch, split_plan(batch, 2), [metrics, metrics]) is metrics


@pytest.mark.parametrize(
    "shares",
    [(TrainMetrics(1.0, 2.0, 3.0, 4), TrainMetrics(1.5, 2.0, 3.0, 4)), (("a",), ("b",)), (1, 2)],
)
def test_no_share_of_a_result_is_dropped_silently(shares: tuple[object, object]) -> None:
    """Neither a list nor a tensor, and not equal: there is nothing right to return."""
    batch = _batch([2, 2])
    with pytest.raises(WorkerError, match="a split call: share 1 returned .*, share 0 .* diverg"):
        collect(batch, split_plan(batch, 2), shares)


def test_replicas_that_diverged_are_named_by_rank() -> None:
    def report(digest: str, seconds: float) -> SyncReport:
        return SyncReport(3, WeightDigest(digest, 20, 1000), seconds)

    reports = [report("aa", 0.1), report("aa", 0.2), report("bb", 0.1), report("bb", 0.1)]
    assert equal_result("sync_weights", "rank", reports[:2]) is reports[0]
    with pytest.raises(WorkerError, match="sync_weights: rank 2, 3 returned .*'bb'.*rank 0 .*'aa'"):
        equal_result("sync_weights", "rank", reports)
    nan = [TrainMetrics(1.0, 1.0, 0.1, 5, {"mismatch/logprob_abs_max": x}) for x in _two_nans()]
    assert equal_result("train", "rank", nan) is nan[0]


def _two_nans() -> tuple[float, float]:
    """As from two processes: not one object."""
    return float("nan"), float("nan")


def test_a_rank_that_returns_too_little_is_noticed() -> None:
    batch = _batch([2, 3])
    with pytest.raises(RuntimeError, match="split"):
        collect(batch, [[0], [1]], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match="zip"):
        collect(["a", "b"], [[0], [1]], [["a"], []])
    with pytest.raises(ValueError, match="no tokens"):
        collect(["a"], [[0]], [torch.zeros(1)])


def test_only_declared_methods_can_be_called_on_a_group() -> None:
    class Worker:
        @dispatch(Dispatch.SPLIT)
        def declared(self) -> None: ...

        def private(self) -> None: ...

    assert dispatch_mode(Worker.declared) is Dispatch.SPLIT
    assert dispatch_mode(Worker().declared) is Dispatch.SPLIT
    with pytest.raises(TypeError, match="no @dispatch"):
        dispatch_mode(Worker.private)
    with pytest.raises(TypeError, match="cannot split a SimpleNamespace"):
        split_plan(SimpleNamespace(), 2)
