"""GSPO and GMPO: worked answers for every branch, and their papers' formulas in plain floats."""

import math

import pytest
from rlhf.testing.loss_steps import (
    PROMPT,
    Answer,
    Step,
    Token,
    answer_of,
    assert_agrees,
    config_of,
    measure,
    measure_answer,
    random_step,
)

E_10 = 22026.465794806717  # exp(10), by table
SEEDS = range(40)


# Two trained tokens, eps 0.2: s = sqrt(r1 r2), and the gradient of each token is -A s / 2.
@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "gradient"),
    [
        ((1.0, 1.0), 2.0, -2.0, -1.0),  # s = 1
        ((1.21, 1.0), 2.0, -2.2, -1.1),  # s = 1.1, inside
        ((4.0, 1.0), 2.0, -2.4, 0.0),  # s = 2: held at 1.2
        ((0.25, 1.0), 2.0, -1.0, -0.5),  # s = 0.5: good and less likely, never held
        ((1.21, 1.0), -2.0, 2.2, 1.1),  # s = 1.1, inside
        ((0.25, 1.0), -2.0, 1.6, 0.0),  # s = 0.5: held at 0.8
        ((4.0, 1.0), -2.0, 4.0, 2.0),  # s = 2: bad and likelier, pushed down
        ((25.0, 1.0), -2.0, 10.0, 5.0),  # s = 5: no dual clip at 3
        ((math.exp(30), 1.0), -2.0, 2 * E_10, 0.0),  # log s = 15, bounded by 10
        ((math.exp(-80), 1.0), 2.0, 0.0, 0.0),  # s = exp(-40) = 4e-18
        ((4.0, 0.25), 2.0, -2.0, -1.0),  # outliers that cancel: s = 1
    ],
)
def test_gspo_by_hand(ratios, advantage, loss, gradient):
    got, slopes = measure_answer(config_of("gspo"), answer_of(ratios, advantage))
    assert got == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert slopes == pytest.approx([gradient, gradient], rel=1e-12, abs=1e-15)


def test_gspo_uses_per_token_advantages_within_an_answer():
    # s = 1.1 is inside for both: losses -1.1 and 2.2; each gradient is that of its own token.
    loss, slopes = measure_answer(config_of("gspo"), answer_of((1.21, 1.0), 1.0, -2.0))
    assert loss == pytest.approx((-1.1 + 2.2) / 2)
    assert slopes == pytest.approx([-1.1 / 2, 2.2 / 2])
    # s = 2 holds the token that is to get likelier, at 1.2, and not the other one: -1.2 and 4.
    loss, slopes = measure_answer(config_of("gspo"), answer_of((4.0, 1.0), 1.0, -2.0))
    assert loss == pytest.approx((-1.2 + 4.0) / 2)
    assert slopes == pytest.approx([0.0, 4.0 / 2])


def test_gspo_takes_the_mean_over_answers_of_whatever_length():
    # s = 1.1 of three tokens (1.331^(1/3)), A = 1: -1.1. s = 0.9 of one, A = -1: 0.9.
    # Mean (-1.1 + 0.9) / 2; a token of the first has -1.1 / 3 / 2, that of the second 0.9 / 2.
    # An answer without a trained token is none of the two.
    step = [answer_of((1.331, 1.0, 1.0), 1.0), answer_of((0.9,), -1.0), [PROMPT, PROMPT]]
    got = measure(config_of("gspo"), step)
    assert got.loss == pytest.approx(-0.1)
    third = -1.1 / 6
    assert got.gradient[0] == pytest.approx([0, third, 0, third, third])
    assert got.gradient[1] == pytest.approx([0, 0.45, 0])
    assert got.gradient[2] == [0, 0]
    assert got.metrics["actor/pg_clipfrac"] == 0
    # Mean of -log r over the four trained tokens: -(ln 1.331 + ln 0.9) / 4.
    assert got.metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.331 * 0.9) / 4)


def test_gspo_bounds_may_differ_and_are_reported():
    # s = 1.25 lies between 1.2 and 1.28.
    step = [answer_of((1.5625, 1.0), 1.0)]
    wide = measure(config_of("gspo", clip_ratio_high=0.28), step)
    assert (wide.loss, wide.metrics["actor/pg_clipfrac"]) == (pytest.approx(-1.25), 0.0)
    narrow = measure(config_of("gspo"), step)
    assert (narrow.loss, narrow.metrics["actor/pg_clipfrac"]) == (pytest.approx(-1.2), 1.0)


def gspo_answer(tokens: Answer, low: float, high: float) -> list[float]:
    """Eq. 7: s = (pi / pi_old)^(1 / |y|); eq. 13: s_t = sg(s) pi_t / sg(pi_t); eq. 5 of s_t."""
    if not tokens:
        return []
    whole = math.prod(math.exp(t.policy - t.old) for t in tokens) ** (1 / len(tokens))
    losses = []
    for t in tokens:
        s = min(whole * math.exp(t.live) / math.exp(t.policy), math.exp(10))
        clipped = min(max(s, 1 - low), 1 + high)
        losses.append(-min(s * t.advantage, clipped * t.advantage))
    return losses


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_is_the_papers_formula(seed):
    def formula(answers: Step) -> list[list[float]]:
        return [gspo_answer(answer, 0.2, 0.3) for answer in answers]

    config = config_of("gspo", clip_ratio_low=0.2, clip_ratio_high=0.3)
    assert_agrees(config, random_step(seed, one_advantage=seed % 2 == 0), formula)


# Two trained tokens, eps 0.2: the loss is -A exp(mean of d), the gradient half of that where d is
# not held. exp(-0.1) = 0.904837418, exp(0.05) = 1.051271096, exp(0.3) = 1.349858808.
@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "gradients"),
    [
        ((0.1, -0.3), 2.0, -1.8096748360719192, (-0.9048374180359596, -0.9048374180359596)),
        ((0.5, -0.1), 2.0, -2.1025421927520481, (0.0, -1.0512710963760241)),  # 0.5 held at 0.2
        ((0.5, 0.1), -2.0, 2.699717615152006, (1.349858807576003, 1.349858807576003)),
        ((-0.5, 0.1), -2.0, 1.902458849001428, (0.0, 0.951229424500714)),  # -0.5 held at -0.2
        ((-0.5, -0.1), 2.0, -1.4816364413634358, (-0.7408182206817179, -0.7408182206817179)),
        ((30.0, 0.0), -1.0, E_10, (0.0, 0.0)),  # mean 15, bounded by 10
        ((-80.0, 80.0), 2.0, -2 * math.exp(-39.9), (-math.exp(-39.9), 0.0)),  # 80 held at 0.2
        ((0.5, -0.5), 0.0, 0.0, (0.0, 0.0)),
    ],
)
def test_geo_mean_by_hand(log_ratios, advantage, loss, gradients):
    answer = [PROMPT, *(Token(-1.0, -1.0 - d, advantage) for d in log_ratios)]
    got, slopes = measure_answer(config_of("geo_mean"), answer)
    assert got == pytest.approx(loss, rel=1e-12)
    assert slopes == pytest.approx(list(gradients), rel=1e-12)


def test_geo_mean_takes_the_mean_of_advantages_that_differ():
    # d = 0.5 of A = 3 is held at 0.2, d = -0.5 of A = -1 at -0.2: exp(0) times the mean of A, 1.
    config = config_of("geo_mean")
    loss, slopes = measure_answer(config, answer_of((math.exp(0.5), math.exp(-0.5)), 3.0, -1.0))
    assert loss == pytest.approx(-1.0)
    assert slopes == [0.0, 0.0]
    # Without advantage nothing holds a token: exp((0.2 - 0.4) / 2), mean of A 0.5, half of it each.
    answer = answer_of((math.exp(0.6), math.exp(-0.4)), 1.0, 0.0)
    loss, slopes = measure_answer(config, answer)
    assert loss == pytest.approx(-0.5 * 0.9048374180359596)
    assert slopes == pytest.approx([0.0, -0.25 * 0.9048374180359596])


def test_geo_mean_reports_what_its_two_bounds_hold():
    # A > 0 with d = 0.5 and 0.3: eps_high 0.4 holds the first alone; exp((0.4 + 0.3) / 2).
    step = [answer_of((math.exp(0.5), math.exp(0.3)), 1.0)]
    got = measure(config_of("geo_mean", clip_ratio_high=0.4), step)
    assert got.loss == pytest.approx(-1.4190675485932571)
    assert got.metrics["actor/pg_clipfrac"] == pytest.approx(0.5)
    assert got.metrics["actor/ppo_kl"] == pytest.approx(-0.4)


def geo_mean_answer(tokens: Answer, low: float, high: float) -> list[float]:
    """Eq. 4: the product of ratios, each held on the side where A would gain, to the 1 / |o|."""
    if not tokens:
        return []
    floor, ceiling = math.exp(-low), math.exp(high)
    held = []
    for t in tokens:
        ratio = math.exp(t.live - t.old)
        # min(r A, clip(r) A) / A: A > 0 takes the smaller ratio, A < 0 the larger one.
        clipped = min(max(ratio, floor), ceiling)
        held.append(min(ratio, clipped) if t.advantage > 0 else max(ratio, clipped))
    mean = math.prod(held) ** (1 / len(tokens))
    advantage = math.fsum(t.advantage for t in tokens) / len(tokens)
    return [-advantage * min(mean, math.exp(10))] * len(tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_geo_mean_is_the_papers_formula(seed):
    def formula(answers: Step) -> list[list[float]]:
        return [geo_mean_answer(answer, 0.3, 0.4) for answer in answers]

    config = config_of("geo_mean", clip_ratio_low=0.3, clip_ratio_high=0.4)
    assert_agrees(config, random_step(seed, one_advantage=seed % 2 == 0), formula)
