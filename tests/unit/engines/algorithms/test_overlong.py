"""The soft overlong punishment at its corners."""

import torch

from engines.config.algorithm import OverlongConfig
from engines.trainers.scoring import overlong_penalty


def test_corners_of_the_ramp():
    overlong = OverlongConfig(enable=True, buffer_length=4, penalty_factor=2.0)
    lengths_B = torch.tensor([1, 16, 17, 18, 20])  # limit 20, ramp from 16
    got = overlong_penalty(lengths_B, 20, overlong)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0]


def test_off_is_zero():
    assert overlong_penalty(torch.tensor([20]), 20, OverlongConfig()).tolist() == [0.0]
