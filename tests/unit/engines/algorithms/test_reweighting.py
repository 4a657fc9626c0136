"""PF-PPO draws samples by their rewards, the same ones for a seed."""

import pytest
import torch

from engines.algorithms.reweighting import resample, resampling_weights
from engines.config.algorithm import PfPpoConfig

REWARDS_B = torch.tensor([1.0, -2.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"reweight_method": "pow"}, [1, 4, 0, 1]),
        ({"reweight_method": "pow", "weight_pow": 1.0}, [1, 2, 0, 1]),
        ({"reweight_method": "max_min"}, [1, 1, 0, 1]),
        ({"reweight_method": "max_random"}, [0.4, 0.1, 0.1, 0.4]),
    ],
)
def test_weights_by_hand(config: dict[str, object], want: list[float]) -> None:
    weights_B = resampling_weights(REWARDS_B, PfPpoConfig.model_validate(config))
    assert weights_B.tolist() == pytest.approx(want)


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    """4 of 6 parts of the weight: 6,667 of 10,000 draws, with a standard deviation of 47."""
    rewards_B = REWARDS_B.repeat(2_500)
    drawn_B = resample(rewards_B, PfPpoConfig(), 7)
    assert drawn_B.shape == (10_000,)
    counts = torch.bincount(drawn_B % 4, minlength=4).tolist()
    assert counts[2] == 0
    assert counts[1] == pytest.approx(6_667, abs=5 * 47)
    assert torch.equal(drawn_B, resample(rewards_B, PfPpoConfig(), 7))
    assert not torch.equal(drawn_B, resample(rewards_B, PfPpoConfig(), 8))


def test_nothing_to_draw_by_leaves_every_sample_once() -> None:
    assert resample(torch.zeros(3), PfPpoConfig(), 0).tolist() == [0, 1, 2]
    assert resample(torch.zeros(0), PfPpoConfig(), 0).tolist() == []
