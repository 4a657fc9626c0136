"""KTO and its reference point: by hand, by the paper's formula, over ranks, at extremes."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf.testing.loss_steps import on_ranks
from torch import Tensor

from engines.algorithms.preference.answers import Answers
from engines.algorithms.preference.kto import (
    MISMATCH,
    NUM_CHOSEN,
    NUM_REJECTED,
    Z0,
    AnswerLoss,
    KtoObjective,
    kto_loss,
)
from engines.algorithms.preference.options import KtoOptions
from engines.types import GlobalCounts, ModelOutputs, TokenBatch

LN_3 = math.log(3)
SIZES = [(2, 1, 19), (1, 4, 4), (3, 12, 1), (2, 0, 5), (1, 0, 0), (1, 7, 0)]


def loss_of(
    log_ratios: list[float], chosen: list[bool], z0: float, options: KtoOptions
) -> tuple[AnswerLoss, Tensor]:
    """With the slope of the summed losses by the log-ratios."""
    leaf_N = torch.tensor(log_ratios, dtype=torch.float64).requires_grad_()
    answers = Answers(leaf_N, torch.ones(len(chosen), dtype=torch.int64), leaf_N)
    found = kto_loss(answers, torch.tensor(chosen), z0, options)
    (slopes_N,) = torch.autograd.grad(found.loss_N.sum(), leaf_N)
    return found, slopes_N


def test_by_hand() -> None:
    """beta 0.5, z0 = 1: log-ratios of 1 + 2 ln 3 have a margin of ln 3, sigmoid 3/4.

    Good: 2 (1 - 3/4) = 1/2, slope -2 * 3/16 * 0.5; bad: 3 (1 - 1/4) = 9/4, slope 3 * 3/16 * 0.5.
    At z0 itself both are half their weight.
    """
    options = KtoOptions(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    there = 1 + 2 * LN_3
    found, slopes_N = loss_of([there, there, 1.0, 1.0], [True, False] * 2, 1.0, options)
    assert found.loss_N.tolist() == pytest.approx([0.5, 2.25, 1.0, 1.5])
    assert slopes_N.tolist() == pytest.approx([-3 / 16, 9 / 32, -0.25, 0.375])
    assert found.reward_N.tolist() == pytest.approx([there / 2, there / 2, 0.5, 0.5])
    assert found.margin_N.tolist() == pytest.approx([LN_3, -LN_3, 0.0, 0.0])


@given(st.floats(-40, 40), st.booleans(), st.floats(0, 30), st.floats(0.05, 2))
def test_it_is_the_papers_formula(log_ratio: float, good: bool, z0: float, beta: float) -> None:
    """lambda - v of eq. 8, in plain floats; the slope as a central difference."""
    options = KtoOptions(beta=beta, desirable_weight=1.3, undesirable_weight=0.6)

    def formula(log_ratio: float) -> float:
        weight = 1.3 if good else 0.6
        inner = beta * (log_ratio - z0) if good else beta * (z0 - log_ratio)
        return weight - weight / (1 + math.exp(-inner))

    found, slopes_N = loss_of([log_ratio], [good], z0, options)
    assert found.loss_N.item() == pytest.approx(formula(log_ratio), abs=1e-9)
    slope = (formula(log_ratio + 1e-5) - formula(log_ratio - 1e-5)) / 2e-5
    assert slopes_N.item() == pytest.approx(slope, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 0.0])
@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("z0", [0.0, 1e4])
def test_extremes_are_finite(log_ratio: float, good: bool, z0: float) -> None:
    found, slopes_N = loss_of([log_ratio], [good], z0, KtoOptions())
    assert 0 <= found.loss_N.item() <= 1
    assert math.isfinite(slopes_N.item())


@pytest.fixture
def batch(make_pairs: Callable[..., TokenBatch]) -> TokenBatch:
    """Answers by themselves: units do not matter."""
    pairs = make_pairs(SIZES, 4)
    return TokenBatch(pairs.input_ids_T, pairs.cu_seqlens, pairs.columns, rows=pairs.rows)


def test_reference_point_averages_trained_answers_of_all_ranks(
    batch: TokenBatch,
) -> None:
    """Also of a rank whose sequences are there for company alone."""
    objective = KtoObjective(KtoOptions())
    num_trained = [int(mask.sum()) for mask in batch.columns["loss_mask"].split(
        batch.lengths_B.tolist())]  # fmt: skip
    trained = [i for i, number in enumerate(num_trained) if number]
    alone = objective.extras(batch, lambda own_N: own_N.double())
    wanted = sum(batch.rows[MISMATCH][i].item() for i in trained) / len(trained)
    assert wanted > 0
    assert alone[Z0] == pytest.approx(wanted)
    assert alone[NUM_CHOSEN] == sum(batch.rows["chosen"][i].item() for i in trained)
    assert alone[NUM_CHOSEN] + alone[NUM_REJECTED] == len(trained) == 8
    untrained = [i for i in range(batch.num_sequences) if not num_trained[i]]
    shares = [untrained, trained[:1], trained[1:5], trained[5:]]
    found = on_ranks(4, lambda rank, gather: objective.extras(batch.select(shares[rank]), gather))
    assert found[0] == pytest.approx(alone, rel=1e-12)
    assert all(each == found[0] for each in found)


def test_reference_point_is_clamped_at_zero_and_keeps_nan(batch: TokenBatch) -> None:
    objective = KtoObjective(KtoOptions())
    low = batch.with_rows(**{MISMATCH: -batch.rows[MISMATCH].abs()})
    assert objective.extras(low, lambda own_N: own_N.double())[Z0] == 0.0
    spoilt = batch.with_rows(**{MISMATCH: torch.full_like(batch.rows[MISMATCH], torch.nan)})
    assert math.isnan(objective.extras(spoilt, lambda own_N: own_N.double())[Z0])


def test_metrics_by_hand() -> None:
    """Good answers with log-ratios 3 and 1, a bad one with 2, z0 = 2 and beta 1; one of no token.

    Margins: 1, -1, 0: right are one and a half of three.
    """
    mask = [[0, 1], [0, 1], [0, 1], [0, 0]]
    batch = TokenBatch.from_sequences([[1, 1]] * 4, loss_mask=mask, ref_logprobs=[[0, -4]] * 4)
    batch = batch.with_rows(
        chosen=torch.tensor([1, 1, 0, 1]), **{MISMATCH: torch.tensor([3.0, 2.0, 1.0, 99.0])}
    )
    objective = KtoObjective(KtoOptions(beta=1.0))
    logprobs_T = torch.tensor([0, -1, 0, -3, 0, -2, 0, -1], dtype=torch.float64)
    extras = objective.extras(batch, lambda own_N: own_N.double())
    found = objective(ModelOutputs(logprobs_T), batch, GlobalCounts(3, 3, 3, extras))
    sigmoid_1 = 1 / (1 + math.exp(-1))
    loss = ((1 - sigmoid_1) + sigmoid_1 + 0.5) / 3
    assert {name: value.item() for name, value in found.metrics.items()} == pytest.approx(
        {
            "preference/loss": loss,
            "preference/accuracy": 0.5,
            "preference/margin": 0.0,
            "preference/kl": 2.0,
            "preference/chosen_reward": 2.0,
            "preference/rejected_reward": 2.0,
        }
    )
    assert found.loss.item() == pytest.approx(loss)


def test_a_step_without_bad_answers_says_nothing_of_their_reward(batch: TokenBatch) -> None:
    objective = KtoObjective(KtoOptions())
    good = batch.with_rows(chosen=torch.ones(batch.num_sequences))
    extras = objective.extras(good, lambda own_N: own_N.double())
    outputs = ModelOutputs(torch.zeros(good.num_tokens))
    found = objective(outputs, good, GlobalCounts(9, 9, 9, extras))
    assert "preference/chosen_reward" in found.metrics
    assert "preference/rejected_reward" not in found.metrics
