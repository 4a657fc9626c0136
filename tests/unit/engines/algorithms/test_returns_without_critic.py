"""REINFORCE++ and ReMax: worked by hand, and what each token still earns as sums of floats."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.testing.algorithm_samples import Answer, Token, estimate_answers, outcome_of

NAMES = ["reinforce_plus_plus", "remax"]
SIZES = st.one_of(st.floats(-2, 2), st.floats(-1e6, 1e6))
TOKENS = st.builds(
    lambda trained, reward: Token(reward * trained, trained),
    st.integers(0, 3).map(bool),
    st.one_of(st.just(0.0), SIZES),
)
ANSWERS = st.builds(
    Answer,
    st.lists(TOKENS, min_size=1, max_size=8),
    greedy=SIZES,
    truncated=st.booleans(),
    last_value=SIZES,
)
STEPS = st.lists(ANSWERS, min_size=1, max_size=6)
GAMMAS = st.one_of(st.just(1.0), st.floats(0.1, 1))
MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def returns_of(answer: Answer, gamma: float) -> list[float]:
    """What each trained token still earns: the sum over l of gamma^l r_{t+l}."""
    rewards = [token.reward for token in answer.kept]
    return [
        math.fsum(gamma**away * reward for away, reward in enumerate(rewards[t:]))
        for t in range(len(rewards))
    ]


def test_reinforce_plus_plus_by_hand() -> None:
    # Outcomes 1 on 1 token and 0 on 3, one of a tool between them: mean 1/4, deviations 3/4, and
    # -1/4 three times; variance (9/16 + 3/16) / 3 = 1/4.
    step = [outcome_of(1.0), outcome_of(0.0, [1, 0, 1, 1])]
    found = estimate_answers("reinforce_plus_plus", step).advantages
    assert found == [pytest.approx([1.5]), pytest.approx([-0.5] * 3)]
    # gamma 1/2, reward 4 behind three tokens: 1, 2, 4, less 7/3: -4/3, -1/3, 5/3, whose squares
    # 16/9, 1/9, 25/9 make the variance 7/3.
    found = estimate_answers(
        "reinforce_plus_plus", [outcome_of(4.0, [1, 1, 0, 1])], options={"gamma": 0.5}
    )
    root = math.sqrt(7 / 3)
    assert found.advantages == [pytest.approx([-4 / 3 / root, -1 / 3 / root, 5 / 3 / root])]


def test_reward_of_a_later_token_reaches_earlier_ones_by_hand() -> None:
    # Rewards 0, -1, 1: still earned 0, 0, 1; mean 1/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3.
    answer = Answer([Token(0.0), Token(-1.0), Token(1.0)])
    found = estimate_answers("reinforce_plus_plus", [answer]).advantages
    third = math.sqrt(1 / 3)
    assert found == [pytest.approx([-third, -third, 2 * third])]


def test_remax_by_hand() -> None:
    # gamma 1/2, reward 4 behind three tokens: 1, 2, 4, less the greedy answer's 3.
    step = [
        replace(outcome_of(4.0, [1, 1, 0, 1]), greedy=3.0),
        replace(outcome_of(0.5), greedy=-0.5),
    ]
    found = estimate_answers("remax", step, options={"gamma": 0.5})
    assert found.advantages == [[-2, -1, 1], [1]]
    assert found.returns == [[0] * 3, [0]], "there is no critic"
    # Rewards 0, -1, 1 are still 0, 0, 1.
    paying = Answer([Token(0.0), Token(-1.0), Token(1.0)], greedy=0.25)
    assert estimate_answers("remax", [paying]).advantages == [[-0.25, -0.25, 0.75]]


@settings(max_examples=80)
@given(answers=STEPS, gamma=GAMMAS)
def test_remax_agrees_with_plain_floats(answers: list[Answer], gamma: float) -> None:
    found = estimate_answers("remax", answers, options={"gamma": gamma}).advantages
    for own, answer in zip(found, answers, strict=True):
        want = [value - answer.greedy for value in returns_of(answer, gamma)]
        assert own == pytest.approx(want, rel=1e-6, abs=1e-6)


@settings(max_examples=80)
@given(answers=STEPS, gamma=GAMMAS)
def test_reinforce_plus_plus_agrees_with_plain_floats(answers: list[Answer], gamma: float) -> None:
    found = estimate_answers("reinforce_plus_plus", answers, options={"gamma": gamma}).advantages
    returns = [returns_of(answer, gamma) for answer in answers]
    tokens = [value for own in returns for value in own]
    if len(tokens) < 2:
        assert not any(map(any, found))
        return
    mean, std = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    for own, want in zip(found, returns, strict=True):
        assert own == pytest.approx([(x - mean) / std for x in want], rel=1e-4, abs=1e-4)


@settings(max_examples=40)
@given(score=st.floats(-1e6, 1e6), masks=st.lists(MASKS, min_size=1, max_size=9))
def test_reinforce_plus_plus_is_silent_where_all_scores_agree(
    score: float, masks: list[list[int]]
) -> None:
    step = [outcome_of(score, mask, group) for group, mask in enumerate(masks)]
    assert not any(map(any, estimate_answers("reinforce_plus_plus", step).advantages))


@settings(max_examples=40)
@given(answers=STEPS)
def test_groups_and_ends_do_not_count(answers: list[Answer]) -> None:
    other = [
        replace(a, group=place % 2, truncated=not a.truncated) for place, a in enumerate(answers)
    ]
    for name in NAMES:
        assert estimate_answers(name, other) == estimate_answers(name, answers)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_in_which_nothing_is_trained_gives_nothing(name: str) -> None:
    step = [outcome_of(1.0, [0]), outcome_of(0.0, [0, 0])]
    assert estimate_answers(name, step).advantages == [[], []]


def test_a_long_answer_and_one_of_a_single_token() -> None:
    # 0.999^k for what a token k places before the end still earns.
    step = [outcome_of(1.0, [1] * 3000), outcome_of(1e6)]
    found = estimate_answers("remax", step, options={"gamma": 0.999}).advantages
    assert found[0] == pytest.approx([0.999**k for k in reversed(range(3000))], rel=1e-5)
    assert found[1] == [1e6]
