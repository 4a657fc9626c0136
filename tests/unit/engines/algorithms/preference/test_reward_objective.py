"""The reward model's loss: by hand, by a second formula, at extremes."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from engines.algorithms.preference.options import RewardModelOptions
from engines.algorithms.preference.pair_objective import (
    RewardModelObjective,
    bradley_terry_loss,
)
from engines.training.step.micro_batches import loss_counts
from engines.types import GlobalCounts, ModelOutputs, TokenBatch

LN_3 = math.log(3)
SCORES = st.floats(-30, 30)


def value_and_slopes(
    chosen: float, rejected: float, margin: float | None, options: RewardModelOptions
) -> tuple[float, list[float]]:
    leaves = [torch.tensor([x], dtype=torch.float64).requires_grad_() for x in (chosen, rejected)]
    margin_P = None if margin is None else torch.tensor([margin])
    loss = bradley_terry_loss(*leaves, margin_P, options).loss_P.sum()
    return loss.item(), [slope.item() for slope in torch.autograd.grad(loss, leaves)]


def test_by_hand() -> None:
    """Scores apart by ln 3: -log(3/4), slopes of -1/4 and 1/4.

    A margin of ln 9 at a coefficient of 1/2 leaves 0: ln 2. Scores ln 3 + 1 and 1 have a sum of
    ln 3 + 2, whose square is added by a tenth.
    """
    value, slopes = value_and_slopes(LN_3 + 1, 1.0, None, RewardModelOptions())
    assert value == pytest.approx(math.log(4 / 3))
    assert slopes == pytest.approx([-0.25, 0.25])
    options = RewardModelOptions(margin_coef=0.5)
    value, slopes = value_and_slopes(LN_3 + 1, 1.0, 2 * LN_3, options)
    assert value == pytest.approx(math.log(2))
    assert slopes == pytest.approx([-0.5, 0.5])
    options = RewardModelOptions(center_coef=0.1)
    value, slopes = value_and_slopes(LN_3 + 1, 1.0, None, options)
    assert value == pytest.approx(math.log(4 / 3) + 0.1 * (LN_3 + 2) ** 2)
    assert slopes == pytest.approx([-0.25 + 0.2 * (LN_3 + 2), 0.25 + 0.2 * (LN_3 + 2)])


@given(SCORES, SCORES, st.floats(0, 5), st.floats(0, 1))
def test_it_is_the_cross_entropy_of_a_choice_between_two(
    chosen: float, rejected: float, margin: float, center: float
) -> None:
    """Of a softmax over both scores, of which the chosen one gives the margin away."""
    options = RewardModelOptions(margin_coef=2.0, center_coef=center)
    value, slopes = value_and_slopes(chosen, rejected, margin, options)
    logits = torch.tensor([[chosen - 2 * margin, rejected]], dtype=torch.float64)
    # The margin travels as float32, as rows of a batch do.
    wanted = float(cross_entropy(logits, torch.tensor([0]))) + center * (chosen + rejected) ** 2
    assert value == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    p_rejected = float(logits.softmax(-1)[0, 1])
    pull = 2 * center * (chosen + rejected)
    assert slopes == pytest.approx([pull - p_rejected, pull + p_rejected], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("apart", [1e4, -1e4, 0.0])
def test_extremes_are_finite(apart: float) -> None:
    options = RewardModelOptions(margin_coef=1.0, center_coef=0.01)
    value, slopes = value_and_slopes(apart, -apart, 3.0, options)
    assert value == pytest.approx(max(3 - 2 * apart, 0.0), abs=5)
    assert all(math.isfinite(slope) for slope in slopes)


def outputs_of(scores_B: Tensor) -> ModelOutputs:
    return ModelOutputs(torch.zeros(0), last_values_B=scores_B)


def test_the_score_of_each_sequence_finds_its_pair(make_pairs: Callable[..., TokenBatch]) -> None:
    """Metrics by hand: the chosen ones have their unit as score, the rejected ones half of it.

    The fourth pair has no trained token and counts nowhere.
    """
    batch = make_pairs([(2, 1, 5), (1, 2, 2), (1, 0, 3), (1, 0, 0)], 7)
    assert batch.unit_B is not None
    chosen_B = batch.rows["chosen"] > 0
    scores_B = torch.where(chosen_B, batch.unit_B.float(), batch.unit_B.float() / 2)
    objective = RewardModelObjective(RewardModelOptions())
    assert objective.readouts.last_values
    counts = GlobalCounts(*loss_counts(batch))
    found = objective(outputs_of(scores_B), batch, counts)
    lengths = batch.lengths_B.tolist()
    masks = batch.columns["loss_mask"].split(lengths)
    units = {u for u, mask in zip(batch.unit_B.tolist(), masks, strict=True) if mask.any()}
    assert len(units) == counts.num_units == 3
    mean = sum(units) / 3
    assert {name: value.item() for name, value in found.metrics.items()} == pytest.approx(
        {
            "reward_model/loss": sum(math.log1p(math.exp(-u / 2)) for u in units) / 3,
            "reward_model/accuracy": 1.0,
            "reward_model/margin": mean / 2,
            "reward_model/chosen_reward": mean,
            "reward_model/rejected_reward": mean / 2,
        }
    )


def test_the_margin_of_the_chosen_answer_counts(make_pairs: Callable[..., TokenBatch]) -> None:
    batch = make_pairs([(2, 1, 5)], 7)
    batch = batch.with_rows(margin=torch.where(batch.rows["chosen"] > 0, 4.0, torch.nan))
    objective = RewardModelObjective(RewardModelOptions(margin_coef=0.25))
    assert objective.required_rows == {"chosen", "margin"}
    found = objective(outputs_of(torch.zeros(2)), batch, GlobalCounts(6, 2, 1))
    assert found.loss.item() == pytest.approx(math.log1p(math.e))
