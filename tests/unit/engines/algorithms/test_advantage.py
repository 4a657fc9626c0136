"""Group-relative advantages against numbers worked by hand and the statistics module."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.testing.algorithm_samples import estimate_B, pack

from engines.algorithms.advantage import advantages
from engines.config.algorithm import AlgorithmConfig
from engines.errors import NonFiniteError
from infra.errors import UnknownPluginError

GRPO = AlgorithmConfig()
DR_GRPO = AlgorithmConfig(norm_adv_by_std_in_grpo=False)


def test_grpo_by_hand():
    # Group 0: scores 1, 0, 0, 1: mean 0.5, unbiased variance 4 * 0.25 / 3 = 1/3.
    # Group 1: scores 3, 0: mean 1.5, unbiased variance 2 * 2.25 / 1 = 4.5.
    scores_B = torch.tensor([1.0, 3.0, 0.0, 0.0, 0.0, 1.0])
    group_B = torch.tensor([0, 1, 0, 1, 0, 0])
    got = estimate_B(GRPO, scores_B, group_B)
    a, b = 0.5 / (0.5773502691896257 + 1e-6), 1.5 / (2.1213203435596424 + 1e-6)
    torch.testing.assert_close(got, torch.tensor([a, b, -a, -b, -a, a]), atol=1e-6, rtol=0)
    assert got.dtype == torch.float32


def test_dr_grpo_by_hand():
    got = estimate_B(DR_GRPO, torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([4, 4, 4, 4]))
    torch.testing.assert_close(got, torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_eps_is_added_to_the_std():
    # std = 7.07e-8: eps inside the variance would give 5e-5, not 0.047.
    got = estimate_B(GRPO, torch.tensor([0.0, 1e-7], dtype=torch.float64), torch.tensor([0, 0]))
    std = statistics.stdev([0.0, 1e-7])
    torch.testing.assert_close(got[1].item(), 0.5e-7 / (std + 1e-6), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e9 + 0.1, -7.3, 0.0])
@pytest.mark.parametrize("algorithm", [GRPO, DR_GRPO])
def test_equal_scores_give_exactly_zero(value, algorithm):
    scores_B = torch.full((16,), value, dtype=torch.float64)
    got = estimate_B(algorithm, scores_B, torch.zeros(16, dtype=torch.int64))
    assert torch.equal(got, torch.zeros(16))


def test_a_single_sample_gives_zero():
    got = estimate_B(GRPO, torch.tensor([5.0, 1.0, 0.0]), torch.tensor([1, 0, 0]))
    assert got[0].item() == 0.0
    assert got[1].item() > 0 > got[2].item()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(-10, 10, allow_nan=False)), min_size=1, max_size=24
    )
)
def test_agrees_with_the_statistics_module(samples):
    groups = [group for group, _ in samples]
    scores = [score for _, score in samples]
    got = estimate_B(GRPO, torch.tensor(scores, dtype=torch.float64), torch.tensor(groups))
    for value, group, score in zip(got.tolist(), groups, scores, strict=True):
        own = [s for g, s in samples if g == group]
        want = 0.0
        if len(set(own)) > 1:
            want = (score - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6)
        assert value == pytest.approx(want, abs=1e-4)


def test_shift_and_order_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    scores_B = torch.rand(12, generator=generator, dtype=torch.float64)
    group_B = torch.arange(12) % 3
    base = estimate_B(GRPO, scores_B, group_B)
    torch.testing.assert_close(estimate_B(GRPO, scores_B + 5, group_B), base)
    order = torch.randperm(12, generator=generator)
    torch.testing.assert_close(estimate_B(GRPO, scores_B[order], group_B[order]), base[order])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_is_named(bad):
    with pytest.raises(NonFiniteError, match=r"sample 2 \(group 1\)"):
        estimate_B(GRPO, torch.tensor([0.0, 1.0, bad]), torch.tensor([0, 0, 1]))


def test_refusals():
    with pytest.raises(UnknownPluginError, match="did you mean grpo"):
        estimate_B(AlgorithmConfig(adv_estimator="grp"), torch.ones(2), torch.tensor([0, 0]))
    batch = pack([1, 1])
    with pytest.raises(ValueError, match="need one per sample"):
        advantages(GRPO, batch, torch.ones(4), torch.tensor([0]))
    with pytest.raises(ValueError, match="need one per token"):
        advantages(GRPO, batch, torch.ones(2), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="need one per sample and component"):
        advantages(GRPO, batch, torch.ones(4), torch.tensor([0, 0]), scores_BR=torch.ones(2, 2))
    with pytest.raises(ValueError, match="negative"):
        estimate_B(GRPO, torch.ones(2), torch.tensor([0, -1]))
    assert estimate_B(GRPO, torch.ones(0), torch.zeros(0, dtype=torch.int64)).numel() == 0
