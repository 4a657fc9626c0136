"""Clip-Cov and KL-Cov: which tokens the pre-pass takes, worked by hand and by the papers' formulas,
and that ranks which hold different tokens take the same ones."""

import math
import statistics
from collections.abc import Sequence

import pytest
from rlhf.testing.loss_steps import (
    MAX_NEW_TOKENS,
    PROMPT,
    Answer,
    Step,
    Token,
    assert_agrees,
    batch_of,
    config_of,
    measure,
    on_ranks,
    random_step,
)

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig

SEEDS = range(40)
LN_2 = math.log(2)


def four_tokens(*ratios: float) -> Step:
    """Advantages (1, 1) and (-1, -1), old logprobs (-1, -3) and (-1, -3): means 0 and -2.

    Covariances: 1 * 1, 1 * -1 and -1 * 1, -1 * -1, that is (1, -1) and (-1, 1).
    """
    logs = [math.log(ratio) for ratio in ratios]
    return [
        [PROMPT, Token(-1 + logs[0], -1, 1, uniform=0.7), Token(-3 + logs[1], -3, 1, uniform=0.1)],
        [
            Token(-1 + logs[2], -1, -1, uniform=0.2),
            PROMPT,
            Token(-3 + logs[3], -3, -1, uniform=0.3),
        ],
    ]


def clip_cov(ratio: float, low: float = 0.5, high: float = 1.5) -> AlgorithmConfig:
    options = {"clip_cov_ratio": ratio, "clip_cov_lb": low, "clip_cov_ub": high}
    return config_of("clip_cov", options=options)


# Each token at ratio 1 has a loss of -A / 4 and a gradient of -A / 4: (-1, -1) and (1, 1) quarters.
@pytest.mark.parametrize(
    ("config", "quarters"),
    [
        (clip_cov(0.0), ([0, -1, -1], [1, 0, 1])),  # nothing is taken
        (clip_cov(0.24), ([0, -1, -1], [1, 0, 1])),  # 0.96 tokens, rounded down
        (clip_cov(0.25), ([0, -1, -1], [1, 0, 0])),  # of covariance 1: the one that drew 0.3
        (clip_cov(0.49), ([0, -1, -1], [1, 0, 0])),  # 1.96 tokens, rounded down
        (clip_cov(0.5), ([0, 0, -1], [1, 0, 0])),  # both
        (clip_cov(1.0), ([0, 0, -1], [1, 0, 0])),  # there are no more of them
        (clip_cov(0.5, low=1.0), ([0, -1, -1], [1, 0, 1])),  # 1 is not above 1
        (clip_cov(0.5, high=1.0), ([0, -1, -1], [1, 0, 1])),  # nor below it
        (clip_cov(0.25, low=-1.0), ([0, -1, -1], [1, 0, 0])),  # -1 with 0.1 takes no place either
        (clip_cov(0.25, low=-1.5, high=-0.5), ([0, -1, 0], [1, 0, 1])),  # of -1: that with 0.1
        (clip_cov(0.75, low=-1.5), ([0, -1, 0], [0, 0, 0])),  # of all: 0.1, 0.2 and 0.3
    ],
)
def test_clip_cov_takes_the_gradient_of_drawn_tokens(config, quarters):
    got = measure(config, four_tokens(1, 1, 1, 1))
    assert [4 * slope for row in got.gradient for slope in row] == [*quarters[0], *quarters[1]]
    assert got.loss == pytest.approx(sum(map(sum, quarters)) / 4)
    taken = 4 - sum(abs(q) for row in quarters for q in row)
    assert got.metrics["actor/cov_clipfrac"] == pytest.approx(taken / 4)


def test_clip_cov_clips_what_is_left_and_has_no_dual_clip():
    # The token that drew 0.3 is taken. A = 1: r = 1.5 is held at 1.2, r = 0.5 is not: -1.2, -0.5.
    # A = -1: r = 5 is neither held nor bounded by c = 3: 5. Sum 3.3.
    got = measure(clip_cov(0.25), four_tokens(1.5, 0.5, 5.0, 0.5))
    assert got.loss == pytest.approx(3.3 / 4)
    assert got.gradient == [
        pytest.approx([0, 0, -0.5 / 4]),
        pytest.approx([5 / 4, 0, 0]),
    ]
    # Left alone, the last one has A = -1 and r = 0.5, held at 0.8 without gradient.
    got = measure(clip_cov(0.0), four_tokens(1.5, 0.5, 5.0, 0.5))
    assert got.loss == pytest.approx((3.3 + 0.8) / 4)
    assert got.gradient[1] == pytest.approx([5 / 4, 0, 0])
    assert got.metrics["actor/pg_clipfrac"] == pytest.approx(0.5)


def kl_cov(ratio: float, coef: float = 1.0) -> AlgorithmConfig:
    return config_of("kl_cov", options={"kl_cov_ratio": ratio, "ppo_kl_coef": coef})


def three_tokens(*log_ratios: float) -> Step:
    """Advantages (3, 0) and 0, old logprobs (-1, -2) and -3: means 1 and -2.

    Covariances: 2 * 1, -1 * 0 and -1 * -1, that is (2, 0) and 1.
    """
    d = log_ratios
    return [
        [PROMPT, Token(-1 + d[0], -1, 3), Token(-2 + d[1], -2, 0)],
        [PROMPT, Token(-3 + d[2], -3, 0)],
    ]


# d = (ln 2, -ln 2) and -ln 2: without penalty -3 * 2 / 3 and a gradient of -2; a penalty adds
# c ln 2 / 3, and c / 3 to the gradient in the direction of d.
@pytest.mark.parametrize(
    ("config", "num_taken", "gradients"),
    [
        (kl_cov(0.0), 0, (-2.0, 0.0, 0.0)),
        (kl_cov(0.33), 0, (-2.0, 0.0, 0.0)),  # 0.99 tokens, rounded down
        (kl_cov(0.34), 1, (-2.0 + 1 / 3, 0.0, 0.0)),  # the covariance 2
        (kl_cov(0.67), 2, (-2.0 + 1 / 3, 0.0, -1 / 3)),  # and 1
        (kl_cov(1.0), 3, (-2.0 + 1 / 3, -1 / 3, -1 / 3)),  # and 0
        (kl_cov(1.0, coef=0.3), 3, (-2.0 + 0.1, -0.1, -0.1)),
    ],
)
def test_kl_cov_holds_back_the_tokens_of_the_largest_covariance(config, num_taken, gradients):
    got = measure(config, three_tokens(LN_2, -LN_2, -LN_2))
    coefficient = config.options["ppo_kl_coef"]
    assert got.loss == pytest.approx(-2 + num_taken * coefficient * LN_2 / 3)
    assert got.gradient == [
        pytest.approx([0, gradients[0], gradients[1]]),
        pytest.approx([0, gradients[2]]),
    ]
    assert got.metrics["actor/cov_klfrac"] == pytest.approx(num_taken / 3)


def test_kl_cov_bounds_the_ratio_without_clipping_or_kl_bound():
    # r = 5 and A = 3: -15. log r = 30 counts as 20 in the ratio, A = 0, and as 30 in the penalty.
    got = measure(kl_cov(0.67), three_tokens(math.log(5), 0.0, 30.0))
    assert got.loss == pytest.approx((-15 + math.log(5) + 30) / 3)
    assert got.gradient == [pytest.approx([0, (-15 + 1) / 3, 0]), pytest.approx([0, 1 / 3])]


def test_kl_cov_shares_its_places_among_tokens_that_tie_for_them():
    # Certain tokens (log pi = 0) of one advantage tie: A 1, 1, 1 and -3 around 0, log pi 0, 0, 0
    # and -4 around -1 have covariances 1, 1, 1 and 9. Of four tokens two are held back: that of 9,
    # and a third of each of the others. log r = -0.5 and 0.5.
    answer = [Token(-0.5, 0.0, 1.0) for _ in range(3)]
    got = measure(kl_cov(0.5), [answer, [PROMPT, Token(-3.5, -4.0, -3.0)]])
    assert got.metrics["actor/cov_klfrac"] == pytest.approx(2 / 4)
    # exp(-0.5) = 0.6065306597, exp(0.5) = 1.6487212707.
    assert got.gradient[0] == pytest.approx([(-0.6065306597126334 - 1 / 3) / 4] * 3)
    assert got.gradient[1] == pytest.approx([0, (3 * 1.6487212707001282 + 1) / 4])
    assert got.loss == pytest.approx(
        (-3 * 0.6065306597126334 + 3 * 1.6487212707001282 + 0.5 + 3 * 0.5 / 3) / 4
    )


def covariances(tokens: Answer) -> list[float]:
    """(A - mean A) (log pi - mean log pi), of the policy before the update."""
    advantage = statistics.fmean(t.advantage for t in tokens)
    logprob = statistics.fmean(t.old for t in tokens)
    return [(t.advantage - advantage) * (t.old - logprob) for t in tokens]


def bounded_ratio(t: Token) -> float:
    return math.exp(min(max(t.live - t.old, -20), 20))


def clip_cov_formula(answers: Step) -> Sequence[Sequence[float]]:
    """Sec. 4.2: ratio * N tokens drawn from those with low < cov < high have a loss of 0."""
    tokens = [t for answer in answers for t in answer]
    pairs = zip(tokens, covariances(tokens), strict=True)
    candidates = sorted(t.uniform for t, cov in pairs if -0.5 < cov < 1.0)
    drawn = candidates[: math.floor(0.3 * len(tokens))]

    def loss(t: Token) -> float:
        ratio = bounded_ratio(t)
        clipped = min(max(ratio, 0.8), 1.3)
        return 0.0 if t.uniform in drawn else -min(ratio * t.advantage, clipped * t.advantage)

    return [[loss(t) for t in answer] for answer in answers]


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_is_the_papers_formula(seed):
    options = {"clip_cov_ratio": 0.3, "clip_cov_lb": -0.5, "clip_cov_ub": 1.0}
    config = config_of("clip_cov", clip_ratio_high=0.3, options=options)
    assert_agrees(config, random_step(seed), clip_cov_formula)


def kl_cov_formula(answers: Step) -> Sequence[Sequence[float]]:
    """Sec. 4.3: the ratio * N tokens of the highest rank also pay beta |log pi - log pi_old|."""
    tokens = [t for answer in answers for t in answer]
    ranking = sorted(covariances(tokens), reverse=True)
    num_taken = math.floor(0.3 * len(tokens))
    last = ranking[num_taken - 1] if num_taken else math.inf
    costs = iter([0.7 if cov >= last else 0.0 for cov in covariances(tokens)])
    return [
        [-t.advantage * bounded_ratio(t) + next(costs) * abs(t.live - t.old) for t in answer]
        for answer in answers
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov_is_the_papers_formula(seed):
    # Beside a ratio of exp(20) a central difference does not see the slope of the penalty.
    assert_agrees(kl_cov(0.3, coef=0.7), random_step(seed, farthest=15.0), kl_cov_formula)


@pytest.mark.parametrize("config", [clip_cov(0.3, low=-9, high=9), kl_cov(0.3)])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_find_what_one_rank_finds(config, seed):
    """Also a rank without a trained token, and tokens that tie across ranks."""
    step = [*random_step(seed, 12, one_advantage=True), [PROMPT, PROMPT]] * 2
    objective, batch = policy_loss_fn(config, MAX_NEW_TOKENS), batch_of(step)
    alone = objective.extras(batch, lambda own_N: own_N.double())
    shares = [[0, 13], [12, 25], range(1, 12), range(14, 25)]
    found = on_ranks(4, lambda rank, gather: objective.extras(batch.select(shares[rank]), gather))
    assert found[0] == pytest.approx(alone, rel=1e-12)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("config", [clip_cov(0.5), kl_cov(0.5)])
def test_a_step_without_a_trained_token_is_silent(config):
    got = measure(config, [[PROMPT, PROMPT], [PROMPT]])
    assert (got.loss, got.gradient) == (0.0, [[0.0, 0.0], [0.0]])
