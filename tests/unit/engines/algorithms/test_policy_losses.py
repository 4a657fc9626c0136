"""Every policy loss by hand at one token, its value and its gradient."""

import math

import pytest
import torch

from engines.algorithms.parts import Part, PolicyLossInputs, find_part
from engines.config.algorithm import AlgorithmConfig
from engines.config.rows import POLICY_LOSSES
from engines.types import GlobalCounts, TokenBatch

OLD = math.log(0.25)


def one_token(
    name: str, ratio: float, advantage: float, old: float = OLD, **config: object
) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient by log pi, and metrics of a token whose ratio to the old policy is given."""
    logprob_T = torch.tensor([old + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    algorithm = AlgorithmConfig.model_validate({"loss_mode": name, **config})
    part: Part = find_part(POLICY_LOSSES, name)
    result = part.function(
        PolicyLossInputs(
            logprobs_T=logprob_T,
            old_logprobs_T=torch.tensor([old], dtype=torch.float64),
            advantages_T=torch.tensor([advantage], dtype=torch.float64),
            mask_T=torch.tensor([True]),
            batch=TokenBatch.from_sequences([[1]], loss_mask=[[1.0]]),
            counts=GlobalCounts(1, 1, 1),
            algorithm=algorithm,
            options=part.options(algorithm),
        )
    )
    result.loss_T.sum().backward()
    assert logprob_T.grad is not None
    metrics = {key: value.item() for key, value in result.token_metrics.items()}
    return result.loss_T.item(), logprob_T.grad.item(), metrics


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "config", "loss", "gradient"),
    [
        # -A s, and its gradient -A s; clipped at 1 + 0.2 and 1 - 0.2 where the loss would gain.
        ("gspo", 1.1, 2.0, {}, -2.2, -2.2),
        ("gspo", 1.5, 2.0, {}, -2.4, 0.0),
        ("gspo", 0.5, 2.0, {}, -1.0, -1.0),
        ("gspo", 0.5, -2.0, {}, 1.6, 0.0),
        ("gspo", 1.5, -2.0, {}, 3.0, 3.0),
        # The log-ratio is held at 0.2 from above (A > 0) and -0.2 from below (A < 0).
        ("geo_mean", math.exp(0.1), 2.0, {}, -2 * math.exp(0.1), -2 * math.exp(0.1)),
        ("geo_mean", math.exp(0.7), 2.0, {}, -2 * math.exp(0.2), 0.0),
        ("geo_mean", math.exp(-0.7), 2.0, {}, -2 * math.exp(-0.7), -2 * math.exp(-0.7)),
        ("geo_mean", math.exp(-0.7), -2.0, {}, 2 * math.exp(-0.2), 0.0),
        ("geo_mean", math.exp(0.7), -2.0, {}, 2 * math.exp(0.7), 2 * math.exp(0.7)),
        # The weight is the ratio within [0.8, 1.2] and has no gradient: log pi does.
        ("cispo", 1.1, 2.0, {}, -1.1 * 2 * (OLD + math.log(1.1)), -2.2),
        ("cispo", 3.0, 2.0, {}, -1.2 * 2 * (OLD + math.log(3)), -2.4),
        ("cispo", 0.5, -2.0, {}, 0.8 * 2 * (OLD + math.log(0.5)), 1.6),
        # 4 sigmoid(0) = 2 at ratio 1, slope 4 x 1/4 = 1; for A < 0 with tau 2: (4 / 2) / 2 = 1.
        ("sapo", 1.0, 2.0, {}, -4.0, -2.0),
        ("sapo", 1.0, -2.0, {"options": {"tau_neg": 2.0}}, 2.0, 2.0),
        # At ratio 2: sigmoid(1) = 0.7310586, slope 0.1966119 x 4 x ratio 2.
        ("sapo", 2.0, 1.0, {}, -4 * 0.7310586, -4 * 0.1966119 * 2),
        ("reinforce", 3.0, 2.0, {}, -2 * (OLD + math.log(3)), -2.0),
        ("gpg", 0.5, -2.0, {}, 2 * (OLD + math.log(0.5)), 2.0),
        # pi from 0.25 to 0.275 moves by 0.025, to 0.5 by 0.25 > 0.2: no gradient.
        ("dppo_tv", 1.1, 2.0, {}, -2 * 1.1 * (OLD + math.log(1.1)), -2.2),
        ("dppo_tv", 2.0, 2.0, {}, 0.0, 0.0),
        ("dppo_tv", 2.0, -2.0, {}, 2 * 2 * math.log(0.5), 4.0),
        ("dppo_tv", 0.1, -2.0, {}, 0.0, 0.0),  # down by 0.225
        ("dppo_tv", 0.1, 2.0, {}, -2 * 0.1 * (OLD + math.log(0.1)), -0.2),
        # A ratio above c = 3 counts as 3, where the token is pushed back.
        ("dppo_tv", 3.9, -2.0, {}, 2 * 3 * (OLD + math.log(3.9)), 6.0),
        # KL of (1/4, 3/4) from (1/2, 1/2): log(1/2)/4 + 3/4 log(3/2) = 0.1308 < 0.2 < from 0.8.
        ("dppo_kl", 2.0, 2.0, {}, -2 * 2 * math.log(0.5), -4.0),
        ("dppo_kl", 2.0, 2.0, {"clip_ratio": 0.13}, 0.0, 0.0),
        ("dppo_kl", 3.2, 2.0, {}, 0.0, 0.0),
        ("dppo_kl", 3.2, -2.0, {}, 2 * 3 * math.log(0.8), 6.0),  # comes back, weight c
        # -A log pi + beta / 2 d^2, with d = log 2 and beta = 0.5.
        (
            "dro", 2.0, 1.0, {"options": {"dro_beta": 0.5}},
            -math.log(0.5) + 0.25 * math.log(2) ** 2, -1 + 0.5 * math.log(2),
        ),
    ],
)  # fmt: skip
def test_by_hand(
    name: str, ratio: float, advantage: float, config: dict[str, object], loss: float,
    gradient: float,
) -> None:  # fmt: skip
    found, slope, metrics = one_token(name, ratio, advantage, **config)
    assert found == pytest.approx(loss, rel=1e-5)
    assert slope == pytest.approx(gradient, rel=1e-5, abs=1e-12)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio), rel=1e-6, abs=1e-12)
    if "actor/pg_clipfrac" in metrics and name not in ("cispo",):
        assert metrics["actor/pg_clipfrac"] == float(gradient == 0.0)


def test_a_sequence_ratio_is_the_geometric_mean() -> None:
    """Log-ratios 0.3 and -0.1: GSPO's s is e^0.1; GMPO holds the first at 0.2, so e^0.05."""
    old_T = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    for name, want in (("gspo", math.exp(0.1)), ("geo_mean", math.exp(0.05))):
        logprobs_T = (old_T + torch.tensor([0.3, -0.1], dtype=torch.float64)).requires_grad_()
        algorithm = AlgorithmConfig(loss_mode=name)
        part = find_part(POLICY_LOSSES, name)
        result = part.function(
            PolicyLossInputs(
                logprobs_T, old_T, torch.ones(2).double(), torch.ones(2).bool(),
                TokenBatch.from_sequences([[1, 1]], loss_mask=[[1.0, 1.0]]),
                GlobalCounts(2, 1, 1), algorithm, part.options(algorithm),
            )
        )  # fmt: skip
        assert result.loss_T.tolist() == pytest.approx([-want, -want], rel=1e-9)
        result.loss_T.mean().backward()
        assert logprobs_T.grad is not None
        # d/d log pi_t of the answer's mean loss is -s / 2 for each token that nothing holds.
        held = [name == "geo_mean", False]
        assert logprobs_T.grad.tolist() == pytest.approx(
            [0.0 if is_held else -want / 2 for is_held in held], rel=1e-9
        )
