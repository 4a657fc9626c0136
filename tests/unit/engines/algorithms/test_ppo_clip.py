"""PPO-clip by hand: clip-higher, dual clip, and the sign of the gradient."""

import math

import pytest
import torch

from engines.algorithms.losses import clip_range, ppo_clip_loss, probability_ratio
from engines.algorithms.parts import PolicyLossInputs
from engines.config.algorithm import AlgorithmConfig
from engines.config.options import NoOptions
from engines.types import GlobalCounts, TokenBatch


def token_loss(ratio: float, advantage: float, **config: float):
    logprob_T = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    result = ppo_clip_loss(
        PolicyLossInputs(
            logprobs_T=logprob_T,
            old_logprobs_T=torch.tensor([-2.0]),
            advantages_T=torch.tensor([advantage]),
            mask_T=torch.tensor([True]),
            batch=TokenBatch.from_sequences([[1]]),
            counts=GlobalCounts(1, 1, 1),
            algorithm=AlgorithmConfig(**config),
            options=NoOptions(),
        )
    )
    result.loss_T.sum().backward()
    assert logprob_T.grad is not None
    return result, logprob_T.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "want", "gradient", "clipped", "lower"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.5, 2.0, -2.4, 0.0, 1, 0),  # good and already likelier: clipped at 1.2
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # good but less likely: pulled back, never clipped
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # bad and already unlikelier: clipped at 0.8
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # bad and likelier: pushed down
        (5.0, -2.0, 6.0, 0.0, 0, 1),  # bad and far likelier: dual clip at c = 3
    ],
)
def test_by_hand(ratio, advantage, want, gradient, clipped, lower):
    result, got_gradient = token_loss(ratio, advantage)
    assert result.loss_T.item() == pytest.approx(want, rel=1e-6)
    assert got_gradient == pytest.approx(gradient, rel=1e-6)
    assert result.token_metrics["actor/pg_clipfrac"].item() == clipped
    assert result.token_metrics["actor/pg_clipfrac_lower"].item() == lower
    assert result.token_metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-6)


def test_clip_higher_moves_only_the_upper_bound():
    assert clip_range(AlgorithmConfig(clip_ratio_high=0.28)) == (0.2, 0.28)
    assert clip_range(AlgorithmConfig(clip_ratio=0.1)) == (0.1, 0.1)
    result, gradient = token_loss(1.25, 1.0, clip_ratio_high=0.28)
    assert result.loss_T.item() == pytest.approx(-1.25)
    assert gradient < 0
    assert token_loss(0.7, -1.0, clip_ratio_high=0.28)[0].loss_T.item() == pytest.approx(0.8)


def test_the_dual_clip_bound_is_configurable():
    assert token_loss(9.0, -1.0, clip_ratio_c=10.0)[0].loss_T.item() == pytest.approx(9.0)
    assert token_loss(11.0, -1.0, clip_ratio_c=10.0)[0].loss_T.item() == pytest.approx(10.0)


def test_the_ratio_stays_finite():
    ratio = probability_ratio(torch.tensor([0.0, -900.0]), torch.tensor([-900.0, 0.0]))
    torch.testing.assert_close(ratio, torch.tensor([math.exp(20.0), math.exp(-20.0)]))
