"""DPPO-TV, DPPO-KL and DRO: worked tokens and their papers' formulas in plain floats."""

import math

import pytest
from rlhf.testing.loss_steps import (
    PROMPT,
    Token,
    assert_agrees,
    config_of,
    measure,
    measure_answer,
    random_step,
    token_by_token,
)

E_20 = 485165195.40979028  # exp(20), by table
SEEDS = range(40)


def moved(old: float, new: float, advantage: float) -> list[Token]:
    """A token whose probability went from old to new."""
    return [PROMPT, Token(math.log(new), math.log(old), advantage)]


# eps 0.2, c 3: the loss is -A w log p with w = min(p / p_old, 3), the gradient -A w.
# ln 0.6 = -0.5108256238, ln 0.8 = -0.2231435513, ln 0.5 = -0.6931471806, ln 0.05 = -2.995732274.
@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss", "gradient"),
    [
        (0.5, 0.6, 2.0, 2.4 * 0.5108256237659907, -2.4),  # +0.1: inside, w = 1.2
        (0.5, 0.8, 2.0, 0.0, 0.0),  # +0.3: outside
        (0.8, 0.5, 2.0, 1.25 * 0.6931471805599453, -1.25),  # -0.3: on its way back, w = 0.625
        (0.8, 0.5, -2.0, 0.0, 0.0),  # -0.3: outside
        (0.5, 0.8, -2.0, -3.2 * 0.2231435513142098, 3.2),  # +0.3: on its way back, w = 1.6
        (0.6, 0.5, -1.0, -(5 / 6) * 0.6931471805599453, 5 / 6),  # -0.1: inside
        (0.01, 0.05, 1.0, 3 * 2.995732273553991, -3.0),  # +0.04: ratio 5 is truncated, inside
        (0.01, 0.05, -1.0, -3 * 2.995732273553991, 3.0),
        (0.5, 0.8, 0.0, 0.0, 0.0),
    ],
)
def test_dppo_tv_by_hand(old, new, advantage, loss, gradient):
    got, slopes = measure_answer(config_of("dppo_tv"), moved(old, new, advantage))
    assert got == pytest.approx(loss)
    assert slopes == pytest.approx([gradient])


def test_dppo_tv_bounds_each_side_and_reports_clip_fraction():
    # +0.3 with eps_high 0.4 is inside: w = 1.6, -ln 0.8 = 0.2231435513. -0.3 with eps_low 0.2 not.
    config = config_of("dppo_tv", clip_ratio_low=0.2, clip_ratio_high=0.4)
    got = measure(config, [moved(0.5, 0.8, 1.0), moved(0.8, 0.5, -1.0)])
    assert got.loss == pytest.approx(1.6 * 0.2231435513142098 / 2)
    assert got.gradient == [pytest.approx([0, -0.8]), [0, 0]]
    assert got.metrics["actor/pg_clipfrac"] == 0.5
    # Means of log p_old - log p: ln(0.5 / 0.8) and ln(0.8 / 0.5) cancel.
    assert got.metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_log_ratio_is_bounded_before_it_is_truncated(name):
    # From e^-45 to e^-5 = 0.0067: a log-ratio of 40 counts as 20, which a c of 1e12 leaves, and
    # -log p is 5. The binary KL is about 0.0067 too: inside either bound.
    config = config_of(name, clip_ratio_c=1e12)
    loss, slopes = measure_answer(config, [Token(-5.0, -45.0, 1.0)])
    assert (loss, slopes) == (pytest.approx(5 * E_20), pytest.approx([-E_20]))


@pytest.mark.parametrize("seed", SEEDS)
def test_dppo_tv_is_the_papers_formula(seed):
    def loss(t: Token) -> float:
        """M sg(min(r, c)) A log pi; M = 0 beyond |pi - pi_old| > eps on the side that A goes to."""
        p, p_old = math.exp(t.policy), math.exp(t.old)
        ratio = math.exp(min(max(t.policy - t.old, -20), 20))
        leaves = (t.advantage > 0 and ratio > 1) or (t.advantage < 0 and ratio < 1)
        distance = (abs(p - p_old) + abs((1 - p) - (1 - p_old))) / 2  # of two Bernoullis
        bound = 0.25 if t.advantage > 0 else 0.15
        outside = leaves and distance > bound
        return 0.0 if outside else -min(ratio, 2.5) * t.advantage * t.live

    config = config_of("dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.25, clip_ratio_c=2.5)
    assert_agrees(config, random_step(seed), token_by_token(loss))


# From 0.5 to 0.6: KL = 0.5 ln(0.5 / 0.6) + 0.5 ln(0.5 / 0.4) = (-0.18232156 + 0.22314355) / 2
# = 0.020411; the same from 0.5 to 0.4. ln 0.4 = -0.9162907319. w = 1.2 and 0.8.
@pytest.mark.parametrize(
    ("new", "advantage", "low", "high", "loss", "gradient"),
    [
        (0.6, 2.0, 0.9, 0.0205, 2.4 * 0.5108256237659907, -2.4),  # inside
        (0.6, 2.0, 0.9, 0.0203, 0.0, 0.0),  # outside
        (0.6, -2.0, 0.001, 0.001, -2.4 * 0.5108256237659907, 2.4),  # on its way back
        (0.4, -2.0, 0.0205, 0.9, -1.6 * 0.916290731874155, 1.6),  # inside
        (0.4, -2.0, 0.0203, 0.9, 0.0, 0.0),  # outside
        (0.4, 2.0, 0.001, 0.001, 1.6 * 0.916290731874155, -1.6),  # on its way back
        (0.6, 0.0, 0.001, 0.001, 0.0, 0.0),
    ],
)
def test_dppo_kl_by_hand(new, advantage, low, high, loss, gradient):
    config = config_of("dppo_kl", clip_ratio_low=low, clip_ratio_high=high)
    got, slopes = measure_answer(config, moved(0.5, new, advantage))
    assert got == pytest.approx(loss)
    assert slopes == pytest.approx([gradient])


def test_dppo_kl_is_measured_from_the_old_policy():
    # From 0.9 to 0.5: 0.9 ln(0.9 / 0.5) + 0.1 ln(0.1 / 0.5) = 0.52900799 - 0.16094379 = 0.3680642;
    # the other way round it would be 0.5 ln(0.5 / 0.9) + 0.5 ln(0.5 / 0.1) = 0.51082562.
    for bound, clipped in ((0.368, 1.0), (0.3681, 0.0)):
        config = config_of("dppo_kl", clip_ratio=bound)
        got = measure(config, [moved(0.9, 0.5, -1.0)])
        assert got.metrics["actor/pg_clipfrac"] == clipped


@pytest.mark.parametrize("seed", SEEDS)
def test_dppo_kl_is_the_papers_formula(seed):
    def loss(t: Token) -> float:
        """M sg(min(r, c)) A log pi; M = 0 beyond KL(B(p_old) || B(p)) > eps where A leads away."""
        p, p_old = math.exp(t.policy), math.exp(t.old)
        ratio = math.exp(min(max(t.policy - t.old, -20), 20))
        leaves = (t.advantage > 0 and ratio > 1) or (t.advantage < 0 and ratio < 1)
        kl = p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))
        outside = leaves and kl > (0.05 if t.advantage > 0 else 0.03)
        return 0.0 if outside else -min(ratio, 2.5) * t.advantage * t.live

    config = config_of("dppo_kl", clip_ratio_low=0.03, clip_ratio_high=0.05, clip_ratio_c=2.5)
    assert_agrees(config, random_step(seed), token_by_token(loss))


# beta 0.1: the loss is -A log pi + 0.05 d^2, the gradient -A + 0.1 d.
@pytest.mark.parametrize(
    ("policy", "old", "advantage", "loss", "gradient"),
    [
        (-1.0, -1.0, 2.0, 2.0, -2.0),  # d = 0
        (-1.0, -2.0, 2.0, 2.05, -1.9),  # d = 1: the pull is against A
        (-2.0, -1.0, 2.0, 4.05, -2.1),  # d = -1: the pull is with A
        (-1.0, -2.0, -2.0, -1.95, 2.1),
        (-2.0, -1.0, -2.0, -3.95, 1.9),
        (-1.0, -2.0, 0.0, 0.05, 0.1),  # without advantage it is the pull alone
        (-1.0, -81.0, 2.0, 322.0, 6.0),  # d = 80: 2 + 0.05 * 6400; not bounded
    ],
)
def test_dro_by_hand(policy, old, advantage, loss, gradient):
    got = measure(config_of("dro"), [[PROMPT, Token(policy, old, advantage)]])
    assert got.loss == pytest.approx(loss)
    assert got.gradient[0] == pytest.approx([0, gradient])
    assert got.metrics["actor/dro_pull"] == pytest.approx(0.05 * (policy - old) ** 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_dro_is_the_papers_formula(seed):
    def loss(t: Token) -> float:
        """A log pi - tau / 2 (log(pi / pi_old))^2, to be maximized."""
        return -(t.advantage * t.live - 0.7 / 2 * (t.live - t.old) ** 2)

    config = config_of("dro", options={"dro_beta": 0.7})
    assert_agrees(config, random_step(seed), token_by_token(loss))
