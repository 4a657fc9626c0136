"""CISPO, SAPO, REINFORCE and GPG: worked tokens and their papers' formulas in plain floats."""

import math

import pytest
from rlhf.testing.loss_steps import (
    PROMPT,
    Token,
    answer_of,
    assert_agrees,
    config_of,
    measure,
    measure_answer,
    random_step,
    token_by_token,
)

E_20 = 485165195.40979028  # exp(20), by table
SEEDS = range(40)


def bounded_ratio(policy: float, old: float) -> float:
    """Of the probabilities, its logarithm within 20."""
    return math.exp(min(max(policy - old, -20.0), 20.0))


# log pi = -1 and eps 0.2: the loss is w A with w the ratio within [0.8, 1.2], the gradient -w A.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, 2.0, 0),
        (1.1, 2.0, 2.2, 0),
        (1.5, 2.0, 2.4, 1),  # above; PPO-clip would drop it
        (0.5, 2.0, 1.6, 1),  # below
        (1.1, -2.0, -2.2, 0),
        (1.5, -2.0, -2.4, 1),
        (0.5, -2.0, -1.6, 1),  # PPO-clip would drop it
        (1.5, 0.0, 0.0, 1),
    ],
)
def test_cispo_by_hand(ratio, advantage, loss, clipped):
    got = measure(config_of("cispo"), [answer_of((ratio,), advantage)])
    assert got.loss == pytest.approx(loss)
    assert got.gradient[0] == pytest.approx([0, -loss, 0])
    assert got.metrics["actor/pg_clipfrac"] == clipped
    assert got.metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio))


def test_cispo_with_an_open_lower_side_and_a_bounded_log_ratio():
    # clip_ratio_low 0.999 leaves r = 0.01 as it is: w A = 0.01 * 3, and log pi = -1.
    config = config_of("cispo", clip_ratio_low=0.999, clip_ratio_high=1e9)
    loss, slopes = measure_answer(config, answer_of((0.01,), 3.0))
    assert (loss, slopes) == (pytest.approx(0.03), pytest.approx([-0.03]))
    # Above, log r = 30 counts as 20: the bound of the log-ratio comes before that of the ratio.
    loss, slopes = measure_answer(config, answer_of((math.exp(30),), 3.0))
    assert (loss, slopes) == (pytest.approx(3 * E_20), pytest.approx([-3 * E_20]))


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_the_papers_formula(seed):
    def loss(t: Token) -> float:
        """Eq. 4: sg(clip(r)) A log pi, the ratio from stopped log-probabilities."""
        weight = min(max(bounded_ratio(t.policy, t.old), 1 - 0.9), 1 + 0.3)
        return -weight * t.advantage * t.live

    config = config_of("cispo", clip_ratio_low=0.9, clip_ratio_high=0.3)
    assert_agrees(config, random_step(seed), token_by_token(loss))


# g = sigmoid(tau (r - 1)): the loss is -A 4 g / tau, the gradient -A 4 g (1 - g) r.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -2.0, -1.0),  # g = 1/2
        (2.0, 1.0, -2.92423431452002, -1.572895465931855),  # g = sigmoid(1) = 0.7310585786
        (0.5, 1.0, -1.510162675192582, -0.4700074244031890),  # g = sigmoid(-1/2) = 0.3775406688
        (1.0, -1.0, 4 / 1.05 / 2, 1.0),
        (2.0, -1.0, 2.821999615632015, 1.536219583390589),  # g = sigmoid(1.05) = 0.7407748992
        (0.5, -1.0, 1.415938330303367, 0.467069911692696),  # g = sigmoid(-0.525) = 0.3716838117
        (math.exp(30), 1.0, -4.0, 0.0),  # the gate is open for good
        (math.exp(30), -1.0, 4 / 1.05, 0.0),
        (math.exp(-30), 1.0, -1.075765685479935, 0.0),  # sigmoid(-1) = 0.2689414214, slope < 1e-8
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_sapo_by_hand(ratio, advantage, loss, gradient):
    # A coefficient of 1.05 is a float32 in the loss: 5e-8 of it.
    got, slopes = measure_answer(config_of("sapo"), answer_of((ratio,), advantage))
    assert got == pytest.approx(loss, rel=2e-7, abs=1e-8)
    assert slopes == pytest.approx([gradient], rel=2e-7, abs=1e-8)


def test_sapo_averages_over_answers_and_reads_its_temperatures():
    # Two tokens with A = 1 and one with A = -1, all at r = 1: 4 g / tau = 2 / tau.
    # tau_pos 0.5 gives -4, tau_neg 4 gives 0.5: mean -1.75; gradients -1 / 2 / 2 and 1 / 2.
    config = config_of("sapo", options={"tau_pos": 0.5, "tau_neg": 4.0})
    got = measure(config, [answer_of((1.0, 1.0), 1.0), answer_of((1.0,), -1.0), [PROMPT]])
    assert got.loss == pytest.approx(-1.75)
    assert got.gradient == [pytest.approx([0, -0.25, 0, -0.25]), pytest.approx([0, 0.5, 0]), [0]]


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_is_the_papers_formula(seed):
    def loss(t: Token) -> float:
        """f(r) A with f(x) = sigmoid(tau (x - 1)) 4 / tau; 1 + tanh is a sigmoid that is safe."""
        tau = 0.75 if t.advantage > 0 else 1.5
        gate = (1 + math.tanh(tau * (bounded_ratio(t.live, t.old) - 1) / 2)) / 2
        return -t.advantage * gate * 4 / tau

    config = config_of("sapo", options={"tau_pos": 0.75, "tau_neg": 1.5})
    assert_agrees(config, random_step(seed), token_by_token(loss))


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
@pytest.mark.parametrize(
    ("policy", "advantage", "loss", "gradient"),
    [(-1.5, 2.0, 3.0, -2.0), (-1.5, -2.0, -3.0, 2.0), (-90.0, 2.0, 180.0, -2.0)],
)
def test_reinforce_by_hand(name, policy, advantage, loss, gradient):
    # -A log pi; a log-ratio of 40 or of 85 changes nothing.
    for old in (policy, policy - 40, -5.0):
        got, slopes = measure_answer(config_of(name), [PROMPT, Token(policy, old, advantage)])
        assert (got, slopes) == (pytest.approx(loss), [gradient])


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_is_its_formula_whatever_the_old_policy(name, seed):
    formula = token_by_token(lambda t: -t.advantage * t.live)
    assert_agrees(config_of(name), random_step(seed), formula)
    config = config_of(name, loss_agg_mode="seq-mean-token-mean")
    assert_agrees(config, random_step(seed), formula)
