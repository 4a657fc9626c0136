"""Our advantages and TRL's own code give the same numbers on the same rewards.

`trl_numbers.py` has asked TRL; what it found stands in `trl_numbers.json`. TRL has them in
float32. What differs on purpose is said where it is undone, and undone exactly.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rlhf.testing.algorithm_samples import estimate_B, pack
from torch import Tensor
from trl_golden import FLOAT32, GOLDEN, batch_of, by_answer, flat

from engines.algorithms.advantage import advantages
from engines.algorithms.advantages import group_relative
from engines.algorithms.kl import reward_kl
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig, OverlongConfig
from engines.trainers.scoring import overlong_penalty

TRL_EPS = 1e-4
"""TRL adds it to a standard deviation; we add 1e-6, and 1e-8 to the variance when we whiten."""


def case_of(name: str) -> tuple[list[list[list[float | None]]], Tensor]:
    """TRL's rewards by function, and (B,) its advantages."""
    case = GOLDEN["advantages"][name]
    return case["rewards"], torch.tensor(case["advantages"], dtype=torch.float64)


def ours_B(name: str, groups: Sequence[Sequence[float | None]], **settings: Any) -> Tensor:
    """(B,) of answers of uneven lengths; those without a score are left out and have 0."""
    lengths = [len(row) for row in GOLDEN["answers"]["mask"]]
    scores = [x for group in groups for x in group]
    kept = [place for place, score in enumerate(scores) if score is not None]
    batch = pack([lengths[place] for place in kept])
    mask_T = batch.columns["loss_mask"] > 0
    scores_B = torch.tensor([scores[place] for place in kept], dtype=torch.float64)
    group_B = torch.tensor([place // len(groups[0]) for place in kept])
    algorithm = AlgorithmConfig(adv_estimator=name, **settings)
    found = advantages(algorithm, batch, on_last_token(scores_B, mask_T, batch), group_B)
    values_B = torch.zeros(len(scores))
    rows = by_answer(found.advantages_T, batch)
    for place, row in zip(kept, rows, strict=True):
        assert set(row) == {row[0]}
        values_B[place] = row[0]
    return values_B.double()


def eps_of_trl_B(groups: Sequence[Sequence[float | None]]) -> Tensor:
    """(B,) by what division by `std + 1e-6` has to be multiplied to be one by `std + 1e-4`."""
    factors = []
    for group in groups:
        scored = [x for x in group if x is not None]
        std = statistics.stdev(scored) if len(scored) > 1 else 0.0
        factors += [(std + group_relative.STD_EPS) / (std + TRL_EPS)] * len(group)
    return torch.tensor(factors, dtype=torch.float64)


@pytest.mark.parametrize("case", ["grpo_group", "grpo_unscored", "grpo_weighted"])
def test_grpo_advantages(case: str) -> None:
    rewards, theirs_B = case_of(case)
    groups = rewards[0]
    if case == "grpo_weighted":
        weights = GOLDEN["advantages"][case]["settings"]["reward_weights"]
        groups = weighted(rewards, weights)
    ours = ours_B("grpo", groups) * eps_of_trl_B(groups)
    assert ours.tolist() == pytest.approx(theirs_B.tolist(), **FLOAT32)


def weighted(rewards: Any, weights: Sequence[float]) -> list[list[float | None]]:
    return [
        [sum(w * x for w, x in zip(weights, each, strict=True)) for each in zip(*own, strict=True)]
        for own in zip(*rewards, strict=True)
    ]


def test_advantages_without_the_std() -> None:
    rewards, theirs_B = case_of("grpo_none")
    ours = ours_B("grpo", rewards[0], norm_adv_by_std_in_grpo=False)
    assert ours.tolist() == pytest.approx(theirs_B.tolist(), **FLOAT32)


@pytest.mark.parametrize("case", ["rloo", "rloo_unscored"])
def test_rloo_advantages(case: str) -> None:
    rewards, theirs_B = case_of(case)
    assert ours_B("rloo", rewards[0]).tolist() == pytest.approx(theirs_B.tolist(), **FLOAT32)


def test_rloo_with_a_kl_in_the_reward() -> None:
    rewards, theirs_B = case_of("rloo_kl")
    step = GOLDEN["answers"]
    batch = batch_of(step)
    scores_B, mask_T = flat(rewards[0]), batch.columns["loss_mask"] > 0
    kl_T, _ = reward_kl("kl", batch)
    coefficient = GOLDEN["advantages"]["rloo_kl"]["settings"]["beta"]
    rewards_T = on_last_token(scores_B, mask_T, batch) - coefficient * kl_T
    group_B = torch.arange(16) // 4
    found = advantages(AlgorithmConfig(adv_estimator="rloo"), batch, rewards_T, group_B)
    first_B = [row[0] for row in by_answer(found.advantages_T, batch)]
    assert first_B == pytest.approx(theirs_B.tolist(), **FLOAT32)


@pytest.mark.parametrize("case", ["grpo_batch", "rloo_normalized"])
def test_scales_of_the_whole_step(case: str) -> None:
    """Ours whitens over tokens, TRL over answers, so answers have one token here.

    TRL divides by the std of the raw rewards with `scale_rewards="batch"`, and by that of the
    leave-one-out advantages, 4 / 3 of the centred rewards, with `normalize_advantages`; ours
    divides by that of the centred rewards.
    """
    rewards, theirs_B = case_of(case)
    raw = [x for group in rewards[0] for x in group]
    centred = [x - statistics.mean(group) for group in rewards[0] for x in group]
    algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus_baseline")
    ours = estimate_B(algorithm, flat(rewards[0]), torch.arange(16) // 4).double()
    ours = ours * math.sqrt(statistics.variance(centred) + 1e-8)
    if case == "rloo_normalized":
        ours, raw = ours * 4 / 3, [x * 4 / 3 for x in centred]
    ours = ours / (statistics.stdev(raw) + TRL_EPS)
    assert ours.tolist() == pytest.approx(theirs_B.tolist(), **FLOAT32)


def test_gdpo_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TRL's eps in each component; the whitening is over answers of one token, as above."""
    rewards, theirs_B = case_of("gdpo")
    weights = GOLDEN["advantages"]["gdpo"]["settings"]["reward_weights"]
    monkeypatch.setattr(group_relative, "STD_EPS", TRL_EPS)
    batch, group_B = pack([1] * 16), torch.arange(16) // 4
    scores_BR = torch.stack([flat(groups) for groups in rewards], dim=1)
    rewards_T = on_last_token(scores_BR.sum(1), batch.columns["loss_mask"] > 0, batch)
    options = {"gdpo_reward_keys": ("first", "second"), "gdpo_reward_weights": tuple(weights)}
    found = advantages(
        AlgorithmConfig(adv_estimator="gdpo", options=options), batch, rewards_T, group_B,
        scores_BR=scores_BR, components=("first", "second"),
    )  # fmt: skip
    parts = [ours_B("grpo", groups) for groups in rewards]
    total_B = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    variance = statistics.variance(total_B.tolist())
    ours = found.advantages_T[1::2].double() * math.sqrt(variance + 1e-8)
    ours = ours / (math.sqrt(variance) + TRL_EPS)
    assert ours.tolist() == pytest.approx(theirs_B.tolist(), **FLOAT32)


@pytest.mark.parametrize("place", range(len(GOLDEN["overlong"])))
def test_overlong_penalty(place: int) -> None:
    """Up to the limit; TRL has -1 for longer answers, which our rollouts cannot give."""
    theirs = GOLDEN["overlong"][place]
    overlong = OverlongConfig(enable=True, buffer_length=theirs["buffer"])
    ours_B = overlong_penalty(torch.tensor(theirs["lengths"]), theirs["limit"], overlong)
    assert ours_B.tolist() == pytest.approx(theirs["penalties"], **FLOAT32)
