"""Shares of a step: they add up to the mean over its pairs, or its answers, however it is cut."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines.algorithms.preference.kto import KtoObjective
from engines.algorithms.preference.options import (
    IpoOptions,
    KtoOptions,
    OrpoOptions,
    RewardModelOptions,
    SigmoidOptions,
    SimpoOptions,
)
from engines.algorithms.preference.pair_objective import (
    PairObjective,
    RewardModelObjective,
    ipo_loss,
    orpo_loss,
    sigmoid_loss,
    simpo_loss,
)
from engines.training.step.micro_batches import filler, loss_counts
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

OBJECTIVES = {
    "sigmoid": PairObjective(sigmoid_loss, SigmoidOptions(beta=0.3, label_smoothing=0.1)),
    "reference-free": PairObjective(sigmoid_loss, SigmoidOptions(reference_free=True)),
    "ipo": PairObjective(ipo_loss, IpoOptions()),
    "simpo": PairObjective(simpo_loss, SimpoOptions()),
    "orpo": PairObjective(orpo_loss, OrpoOptions()),
    "kto": KtoObjective(KtoOptions(beta=0.4, desirable_weight=1.2, undesirable_weight=0.7)),
    "bradley_terry": RewardModelObjective(RewardModelOptions(margin_coef=0.5, center_coef=0.1)),
}
SIZES = [(2, 1, 19), (1, 4, 4), (3, 12, 1), (2, 0, 5), (1, 0, 0), (4, 2, 3), (1, 7, 0), (2, 1, 1)]
"""One answer is empty here, the other there, both in the fifth, which counts nowhere."""
NUM_COUNTED = 7
MakePairs = Callable[..., TokenBatch]


def counts_of(objective: Any, batch: TokenBatch) -> GlobalCounts:
    """As the engine makes them, of one rank."""
    extras = getattr(objective, "extras", None)
    found = extras(batch, lambda own_N: own_N.double()) if extras else {}
    return GlobalCounts(*loss_counts(batch), found)


def outputs_of(leaves: tuple[Tensor, Tensor], batch: TokenBatch, whole: TokenBatch) -> ModelOutputs:
    """What a model would say of some sequences of the whole: found again by number."""
    token_T, sequence_B = batch.columns["number"].long(), batch.rows["number"]
    return ModelOutputs(leaves[0][token_T], last_values_B=leaves[1][sequence_B])


def numbered(batch: TokenBatch) -> TokenBatch:
    return batch.with_columns(number=torch.arange(batch.num_tokens)).with_rows(
        number=torch.arange(batch.num_sequences)
    )


def leaves_of(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    sizes = (batch.num_tokens, batch.num_sequences)
    logprobs, scores = (torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes)
    return (-2 * logprobs.abs()).requires_grad_(), scores.requires_grad_()


def add_up(
    objective: Any, whole: TokenBatch, parts: list[TokenBatch]
) -> tuple[float, dict[str, float], list[Tensor]]:
    """Loss, metrics and gradients of a step that was cut so."""
    leaves, counts = leaves_of(whole), counts_of(objective, whole)
    loss, metrics = 0.0, {}
    for part in parts:
        found: LossOutput = objective(outputs_of(leaves, part, whole), part, counts)
        found.loss.backward()
        loss += found.loss.item()
        for name, value in found.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
    return loss, metrics, [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=12, deadline=None)
@given(
    of_part=st.lists(st.integers(0, 6), min_size=len(SIZES), max_size=len(SIZES)),
    seed=st.integers(0, 5),
    num_fillers=st.integers(0, 2),
)
def test_shares_of_any_cut_add_up(
    name: str, of_part: list[int], seed: int, num_fillers: int, make_pairs: MakePairs
) -> None:
    """Of 1 to 7 parts with whole units, and fillers beside them."""
    objective, whole = OBJECTIVES[name], numbered(make_pairs(SIZES, seed))
    taken: dict[int, list[int]] = {}
    for part, unit in zip(of_part, whole.units, strict=True):
        taken.setdefault(part, []).extend(unit)
    parts = [whole.select(sequences[::-1]) for sequences in taken.values()]
    parts += [filler(whole).batch] * num_fillers
    loss, metrics, gradients = add_up(objective, whole, [whole])
    cut_loss, cut_metrics, cut_gradients = add_up(objective, whole, parts)
    assert cut_loss == pytest.approx(loss, rel=1e-12)
    assert cut_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-14)
    for found, wanted in zip(cut_gradients, gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def pairs_by_hand(batch: TokenBatch, logprobs_T: Tensor, reference: bool) -> list[dict[str, Any]]:
    """Sum and number of trained tokens of both answers of each counted pair, by plain loops."""
    log_ratios = logprobs_T - batch.columns["ref_logprobs"] if reference else logprobs_T
    bounds, mask, found = batch.cu_seqlens.tolist(), batch.columns["loss_mask"].tolist(), {}
    assert batch.unit_B is not None
    for index, unit in enumerate(batch.unit_B.tolist()):
        own = [t for t in range(bounds[index], bounds[index + 1]) if mask[t]]
        side = "chosen" if batch.rows["chosen"][index] else "rejected"
        pair = found.setdefault(unit, {})
        pair[side] = math.fsum(log_ratios[t].item() for t in own)
        pair[f"{side}_tokens"] = len(own)
    return [p for p in found.values() if p["chosen_tokens"] or p["rejected_tokens"]]


def test_metrics_are_means_over_the_pairs_that_count(make_pairs: MakePairs) -> None:
    batch = numbered(make_pairs(SIZES, 3))
    leaves = leaves_of(batch)
    objective = PairObjective(sigmoid_loss, SigmoidOptions(beta=0.3))
    found = objective(outputs_of(leaves, batch, batch), batch, counts_of(objective, batch))
    pairs = pairs_by_hand(batch, leaves[0].detach(), reference=True)
    assert len(pairs) == NUM_COUNTED
    margins = [0.3 * (p["chosen"] - p["rejected"]) for p in pairs]
    wanted = {
        "preference/loss": math.fsum(math.log1p(math.exp(-m)) for m in margins),
        "preference/accuracy": sum(m > 0 for m in margins),
        "preference/margin": math.fsum(margins),
        "preference/chosen_reward": 0.3 * math.fsum(p["chosen"] for p in pairs),
        "preference/rejected_reward": 0.3 * math.fsum(p["rejected"] for p in pairs),
    }
    assert {name: x.item() * NUM_COUNTED for name, x in found.metrics.items()} == pytest.approx(
        wanted
    )
    assert found.loss.item() == pytest.approx(wanted["preference/loss"] / NUM_COUNTED)


def test_untrained_tokens_have_no_gradient_or_effect_on_loss(
    make_pairs: MakePairs,
) -> None:
    batch = numbered(make_pairs(SIZES, 1))
    off_T = batch.columns["loss_mask"] == 0
    for name, objective in OBJECTIVES.items():
        loss, _, gradients = add_up(objective, batch, [batch])
        assert not gradients[0][off_T].any(), name
        spoilt = batch.with_columns(
            ref_logprobs=torch.where(off_T, torch.nan, batch.columns["ref_logprobs"])
        )
        again, _, after = add_up(objective, spoilt, [spoilt])
        assert again == loss, name
        assert all(torch.equal(x, y) for x, y in zip(after, gradients, strict=True)), name


def test_a_policy_that_is_its_reference_is_right_by_half(make_pairs: MakePairs) -> None:
    """The first step: all log-ratios are 0, the loss is ln 2, the accuracy that of a coin."""
    batch = make_pairs(SIZES, 2)
    objective = PairObjective(sigmoid_loss, SigmoidOptions())
    outputs = ModelOutputs(batch.columns["ref_logprobs"])
    found = objective(outputs, batch, counts_of(objective, batch))
    assert found.loss.item() == pytest.approx(math.log(2))
    assert found.metrics["preference/accuracy"].item() == pytest.approx(0.5)
    assert found.metrics["preference/margin"].item() == 0.0


def test_small_log_ratios_survive_next_to_a_large_one_in_float32() -> None:
    """8192, and 3,999 times 1/8192: a float32 next to 8192 lies 8/8192 away."""
    num_tokens, small = 4000, 2.0**-13
    masks = [[0.0] + [1.0] * num_tokens] * 2
    batch = TokenBatch.from_sequences([[1] * (num_tokens + 1)] * 2, loss_mask=masks)
    batch = replace(batch, unit_B=torch.tensor([0, 0])).with_rows(chosen=torch.tensor([1.0, 0.0]))
    logprobs_T = torch.full((batch.num_tokens,), -5.0)
    ref_T = logprobs_T.clone()
    ref_T[1 : num_tokens + 1] -= small
    ref_T[1] = -5.0 - 8192.0
    objective = PairObjective(sigmoid_loss, SigmoidOptions(beta=1.0))
    batch = batch.with_columns(ref_logprobs=ref_T)
    found = objective(ModelOutputs(logprobs_T), batch, counts_of(objective, batch))
    assert found.metrics["preference/margin"].item() == 8192.0 + (num_tokens - 1) * small


def test_what_is_missing_is_named(make_pairs: MakePairs) -> None:
    batch = make_pairs(SIZES)
    bare = TokenBatch(batch.input_ids_T, batch.cu_seqlens, {}, unit_B=batch.unit_B)
    counts = GlobalCounts(1, 1, 1, {"kto_z0": 0.0})
    outputs = ModelOutputs(torch.zeros(batch.num_tokens), last_values_B=torch.zeros(16))
    with pytest.raises(ValueError, match=r"columns \['loss_mask', 'ref_logprobs'\]"):
        OBJECTIVES["sigmoid"](outputs, bare, counts)
    with pytest.raises(ValueError, match=r"columns \['loss_mask', 'ref_logprobs'\]"):
        OBJECTIVES["kto"](outputs, bare, counts)
    masked = bare.with_columns(loss_mask=batch.columns["loss_mask"])
    with pytest.raises(ValueError, match=r"rows \['chosen'\]; the batch has \[\]"):
        OBJECTIVES["simpo"](outputs, masked, counts)
    with pytest.raises(ValueError, match=r"rows \['chosen', 'margin'\]"):
        OBJECTIVES["bradley_terry"](outputs, masked, counts)
    with pytest.raises(ValueError, match=r"rows \['chosen', 'mismatch_log_ratio'\]"):
        OBJECTIVES["kto"].extras(masked, lambda own_N: own_N)
    with pytest.raises(ValueError, match="needs a value model"):
        OBJECTIVES["bradley_terry"](ModelOutputs(torch.zeros(batch.num_tokens)), batch, counts)


@pytest.mark.parametrize(
    ("units", "chosen"),
    [
        ([1, 1, 2, 2], [1, 0, 1, 1]),  # two chosen
        ([1, 1, 2, 2], [1, 0, 0, 0]),  # none
        ([1, 1, 1, 1], [1, 0, 1, 0]),  # two pairs in one unit
        ([1, 1, 2, 3], [1, 0, 1, 0]),  # no partner
    ],
)
def test_a_unit_that_is_no_pair_is_refused(units: list[int], chosen: list[float]) -> None:
    batch = TokenBatch.from_sequences([[1, 1]] * 4, loss_mask=[[0, 1]] * 4)
    batch = batch.with_rows(chosen=torch.tensor(chosen))
    counts = GlobalCounts(4, 4, 2)
    with pytest.raises(ValueError, match="needs unit_B"):
        OBJECTIVES["simpo"](ModelOutputs(torch.zeros(8)), batch, counts)
    batch = replace(batch, unit_B=torch.tensor(units))
    with pytest.raises(ValueError, match="need one of each in every unit"):
        OBJECTIVES["simpo"](ModelOutputs(torch.zeros(8)), batch, counts)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_travel_by_pickle(name: str) -> None:
    assert pickle.loads(pickle.dumps(OBJECTIVES[name])) == OBJECTIVES[name]
