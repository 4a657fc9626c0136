"""Dynamic sampling keeps exactly the groups that carry a gradient."""

import torch
from rlhf.testing.algorithm_samples import estimate_B

from engines.config.algorithm import AlgorithmConfig, FilterGroupsConfig
from engines.trainers.experience import informative_samples

ON = FilterGroupsConfig(enable=True)
SCORES_B = torch.tensor([1.0, 0.1, 0.0, 0.1, 1.0, 7.0, 0.1])
GROUP_B = torch.tensor([0, 1, 0, 1, 3, 2, 1])


def test_equal_and_single_groups_go():
    kept = informative_samples(ON, SCORES_B, GROUP_B)
    assert kept.tolist() == [True, False, True, False, False, False, False]


def test_what_goes_has_advantage_zero_and_what_stays_has_not():
    advantages_B = estimate_B(AlgorithmConfig(), SCORES_B, GROUP_B)
    assert torch.equal(advantages_B != 0, informative_samples(ON, SCORES_B, GROUP_B))


def test_off_keeps_everything():
    assert informative_samples(FilterGroupsConfig(), SCORES_B, GROUP_B).all()
    assert informative_samples(ON, SCORES_B[:0], GROUP_B[:0]).shape == (0,)
