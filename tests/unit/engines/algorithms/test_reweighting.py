"""PF-PPO's weights against plain floats, and how often samples are drawn by them."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.algorithms.policy_objective import resample, resampling_weights
from engines.config.algorithm import PfPpoConfig

METHODS = ["pow", "max_min", "max_random"]
REWARDS = st.lists(
    st.one_of(
        st.sampled_from([0.0, 1.0, -1.0]),
        # Not so small that a power of it is 0.
        st.one_of(st.floats(-2, 2), st.floats(-1e6, 1e6)).map(lambda x: round(x, 6)),
    ),
    min_size=1,
    max_size=20,
)
CONFIGS = st.builds(
    PfPpoConfig, reweight_method=st.sampled_from(METHODS), weight_pow=st.floats(0.25, 4)
)


def weights(
    rewards: list[float], config: PfPpoConfig, prompts: list[int] | None = None
) -> list[float]:
    index_B = torch.tensor(prompts or [0] * len(rewards), dtype=torch.int64)
    return resampling_weights(torch.tensor(rewards, dtype=torch.float64), index_B, config).tolist()


def drawn(
    rewards: list[float], config: PfPpoConfig, seed: int, prompts: list[int] | None = None
) -> list[int]:
    index_B = torch.tensor(prompts or [0] * len(rewards), dtype=torch.int64)
    return resample(torch.tensor(rewards, dtype=torch.float64), index_B, config, seed).tolist()


def by_paper(rewards: list[float], config: PfPpoConfig) -> list[float]:
    if config.reweight_method == "pow":
        return [abs(reward) ** config.weight_pow for reward in rewards]
    if config.reweight_method == "max_min":
        return [float(reward in (max(rewards), min(rewards))) for reward in rewards]
    return [0.4 if reward == max(rewards) else 0.1 for reward in rewards]


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"reweight_method": "pow"}, [1, 4, 0, 1]),
        ({"reweight_method": "pow", "weight_pow": 1.0}, [1, 2, 0, 1]),
        ({"reweight_method": "pow", "weight_pow": 0.5}, [1, math.sqrt(2), 0, 1]),
        ({"reweight_method": "max_min"}, [1, 1, 0, 1]),
        ({"reweight_method": "max_random"}, [0.4, 0.1, 0.1, 0.4]),
    ],
)
def test_weights_by_hand(config: dict[str, Any], want: list[float]) -> None:
    found = weights([1.0, -2.0, 0.0, 1.0], PfPpoConfig.model_validate(config))
    assert found == pytest.approx(want, rel=1e-12)


@given(rewards=REWARDS, config=CONFIGS)
def test_weights_agree_with_plain_floats(rewards: list[float], config: PfPpoConfig) -> None:
    assert weights(rewards, config) == pytest.approx(by_paper(rewards, config), rel=1e-12)


@given(rewards=REWARDS, config=CONFIGS, seed=st.integers(0, 2**63 - 1))
def test_what_is_drawn_has_a_weight_and_keeps_the_order(
    rewards: list[float], config: PfPpoConfig, seed: int
) -> None:
    found, wanted = drawn(rewards, config, seed), by_paper(rewards, config)
    assert len(found) == len(rewards)
    assert found == sorted(found)
    if sum(wanted) == 0:
        assert found == list(range(len(rewards)))
    else:
        assert all(wanted[place] > 0 for place in found)
    assert drawn(rewards, config, seed) == found


@given(rewards=REWARDS, seed=st.integers(0, 2**63 - 1))
@settings(max_examples=40)
def test_lone_sample_or_lone_weight_is_the_only_one_drawn(rewards: list[float], seed: int) -> None:
    assert drawn(rewards[:1], PfPpoConfig(), seed) == [0]
    alone = [0.0] * len(rewards) + [1e6] + [0.0] * len(rewards)
    assert drawn(alone, PfPpoConfig(), seed) == [len(rewards)] * len(alone)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_samples_are_drawn_as_often_as_their_weights_say(method: str, scale: float) -> None:
    """Within five standard deviations of a binomial, for each of four rewards."""
    rewards = [scale * reward for reward in (1.0, -2.0, 0.5, 1.5)]
    config = PfPpoConfig(reweight_method=method)
    own = by_paper(rewards, config)
    counts = Counter(place % 4 for place in drawn(rewards * 5_000, config, 7))
    for kind, weight in enumerate(own):
        share = weight / sum(own)
        spread = math.sqrt(20_000 * share * (1 - share))
        assert counts[kind] == pytest.approx(20_000 * share, abs=5 * spread)


def test_samples_are_drawn_with_replacement_and_each_by_itself() -> None:
    """Of equal weights a share of 1/e is not drawn at all: 3,679 of 10,000, give or take 31."""
    found = drawn([1.0] * 10_000, PfPpoConfig(), 3)
    assert 10_000 - len(set(found)) == pytest.approx(10_000 / math.e, abs=5 * 31)
    assert found != drawn([1.0] * 10_000, PfPpoConfig(), 4)


def test_nothing_to_draw_by_leaves_every_sample_once() -> None:
    assert drawn([0.0] * 3, PfPpoConfig(), 0) == [0, 1, 2]
    assert drawn([], PfPpoConfig(), 0) == []


@pytest.mark.parametrize(
    ("method", "want"),
    [
        # Prompt 7 has the rewards 3, 1, 2 and prompt 2 has -1, -1, 0.
        ("max_min", [1, 1, 1, 1, 0, 1]),
        ("max_random", [0.4, 0.1, 0.1, 0.1, 0.1, 0.4]),
        ("pow", [9, 1, 1, 1, 4, 0]),
    ],
)
def test_answers_are_ranked_among_those_to_their_own_prompt(method: str, want: list[float]) -> None:
    rewards, prompts = [3.0, -1.0, 1.0, -1.0, 2.0, 0.0], [7, 2, 7, 2, 7, 2]
    assert weights(rewards, PfPpoConfig(reweight_method=method), prompts) == want


@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**63 - 1))
def test_each_prompt_keeps_its_number_of_answers(
    data: st.DataObject, config: PfPpoConfig, seed: int
) -> None:
    rewards = data.draw(REWARDS)
    size = {"min_size": len(rewards), "max_size": len(rewards)}
    prompts = data.draw(st.lists(st.integers(0, 3), **size))
    found = drawn(rewards, config, seed, prompts)
    assert Counter(prompts[place] for place in found) == Counter(prompts)
    for prompt in set(prompts):
        places = [place for place, one in enumerate(prompts) if one == prompt]
        own = by_paper([rewards[place] for place in places], config)
        allowed = {place for place, weight in zip(places, own, strict=True) if weight > 0}
        assert {place for place in found if prompts[place] == prompt} <= (allowed or set(places))
