"""Generalised advantage estimation: worked by hand, and its definition as sums of plain floats."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rlhf.testing.algorithm_samples import Answer, Estimated, Token, estimate_answers

EXPLAINED = "critic/vf_explained_var"
SIZES = st.one_of(st.floats(-2, 2), st.floats(-1e6, 1e6))
TOKENS = st.builds(
    lambda trained, reward, value: Token(reward * trained, trained, value),
    st.integers(0, 3).map(bool),
    st.one_of(st.just(0.0), SIZES),
    SIZES,
)
ANSWERS = st.builds(
    Answer,
    st.lists(TOKENS, min_size=1, max_size=8),
    last_value=SIZES,
    truncated=st.booleans(),
)
STEPS = st.lists(ANSWERS, min_size=1, max_size=6)
"""Tokens of tools between the trained ones, answers without any, ends that are none."""
SHARES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
GAMMAS = st.one_of(st.just(1.0), st.floats(0.1, 1))


def tokens_of(rewards: Sequence[float], values: Sequence[float]) -> list[Token]:
    return [Token(r, value=v) for r, v in zip(rewards, values, strict=True)]


def gae(answers: Sequence[Answer], **options: object) -> Estimated:
    return estimate_answers("gae", answers, options=options)


def end_of(answer: Answer) -> float:
    """What is left to come behind the answer."""
    return answer.last_value if answer.truncated else 0.0


def values_behind(answer: Answer) -> list[float]:
    """What is left to come in the state behind each trained token."""
    values = [token.value for token in answer.kept]
    return [*values[1:], *[end_of(answer)] * bool(values)]


def by_definition(answer: Answer, gamma: float, lam: float) -> list[float]:
    """A_t, the sum over l of (gamma lam)^l delta_{t+l}."""
    deltas = [
        token.reward + gamma * behind - token.value
        for token, behind in zip(answer.kept, values_behind(answer), strict=True)
    ]
    return [
        math.fsum((gamma * lam) ** away * delta for away, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def assert_close(found: list[list[float]], wanted: list[list[float]]) -> None:
    """As close as float32 is at the largest of them."""
    largest = max((abs(value) for values in wanted for value in values), default=0.0)
    for values, want in zip(found, wanted, strict=True):
        assert values == pytest.approx(want, rel=1e-5, abs=1e-6 * largest + 1e-6)


def test_by_hand() -> None:
    # Values 1, 2; reward 3 at the end; gamma 0.5, lam 0.5. Last: 3 - 2 = 1. First: delta is
    # 0 + 0.5 x 2 - 1 = 0, plus 0.25 x 1. Targets: 1 + 0.25 and 2 + 1.
    answer = Answer(tokens_of([0, 3], [1, 2]), last_value=4.0)
    found = gae([answer], gamma=0.5, lam=0.5, whiten=False)
    assert found.advantages == [pytest.approx([0.25, 1])]
    assert found.returns == [pytest.approx([1.25, 3])]
    # Values less targets 0.25, 1 have the variance 9/32, targets 1.25, 3 have 49/32.
    assert found.metrics[EXPLAINED] == pytest.approx(1 - 9 / 49)


def test_whitened_by_hand() -> None:
    # 0.25 and 1 less their mean 0.625 are -+0.375, their variance 2 x 0.140625: +-sqrt(1/2).
    answer = Answer(tokens_of([0, 3], [1, 2]))
    found = gae([answer], gamma=0.5, lam=0.5)
    assert found.advantages == [pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])]
    assert found.returns == [pytest.approx([1.25, 3])], "targets are never whitened"


def test_a_truncated_answer_is_not_over_by_hand() -> None:
    # V = 4 behind the end. Last: 3 + 0.5 x 4 - 2 = 3; first: 0 + 0.25 x 3.
    cut = Answer(tokens_of([0, 3], [1, 2]), last_value=4.0, truncated=True)
    found = gae([cut], gamma=0.5, lam=0.5, whiten=False)
    assert found.advantages == [pytest.approx([0.75, 3])]
    assert found.returns == [pytest.approx([1.75, 5])]


def test_gae_ends_truncated_answer_without_bootstrap_by_hand() -> None:
    # The value of 4 behind the end counts for nothing. Last: 3 - 2 = 1; first: 1 - 1 + 0.25 x 1.
    cut = Answer(tokens_of([0, 3], [1, 2]), last_value=4.0, truncated=True)
    found = gae([cut], gamma=0.5, lam=0.5, whiten=False, bootstrap_truncated=False)
    assert found.advantages == [pytest.approx([0.25, 1])]
    assert found.returns == [pytest.approx([1.25, 3])]


def test_tokens_of_a_tool_are_passed_over_by_hand() -> None:
    # Between the two stands what a tool wrote, of value 100: neither is it looked at, nor does it
    # take a step of gamma.
    first, last = tokens_of([0, 3], [1, 2])
    tool = Token(trained=False, value=100.0)
    found = gae([Answer([first, tool, tool, last, tool])], gamma=0.5, lam=0.5, whiten=False)
    assert found.advantages == [pytest.approx([0.25, 1])]


def test_decoupled_by_hand() -> None:
    # Values 1, 1, reward 2 at the end: deltas 0, 1. The policy's lam 0 leaves them; the critic's
    # lam 1 has targets of 2 everywhere.
    found = gae([Answer(tokens_of([0, 2], [1, 1]))], lam=0.0, lam_critic=1.0, whiten=False)
    assert found.advantages == [[0, 1]]
    assert found.returns == [[2, 2]]


def test_length_adaptive_lambda_by_hand() -> None:
    # alpha 0.5 and 4 tokens: lam = 1 - 1 / 2. Values 0, reward 1 at the end: A = 1/8, 1/4, 1/2, 1.
    # Of 20 tokens: lam = 1 - 1 / 10. Of one, 1 - 1 / 0.5 is below 0 and taken for 0. A tool's
    # tokens are no part of the length.
    four = tokens_of([0, 0, 0, 1], [0] * 4)
    twenty = tokens_of([0] * 19 + [1], [0] * 20)
    step = [Answer([*four[:2], Token(trained=False), *four[2:]]), Answer(twenty), Answer(four[3:])]
    found = gae(step, length_adaptive_alpha=0.5, lam_critic=1.0, whiten=False)
    assert found.advantages[0] == pytest.approx([0.125, 0.25, 0.5, 1])
    assert found.advantages[1] == pytest.approx([0.9**k for k in reversed(range(20))])
    assert found.advantages[2] == [1]
    assert found.returns == [[1] * 4, [1] * 20, [1]]


@settings(max_examples=80)
@given(answers=STEPS, gamma=GAMMAS, lam=SHARES, lam_critic=st.one_of(st.none(), SHARES))
def test_agrees_with_its_definition(
    answers: list[Answer], gamma: float, lam: float, lam_critic: float | None
) -> None:
    found = gae(answers, gamma=gamma, lam=lam, lam_critic=lam_critic, whiten=False)
    assert_close(found.advantages, [by_definition(answer, gamma, lam) for answer in answers])
    of_critic = lam if lam_critic is None else lam_critic
    parts = [by_definition(answer, gamma, of_critic) for answer in answers]
    targets = [
        [part + token.value for part, token in zip(own, answer.kept, strict=True)]
        for own, answer in zip(parts, answers, strict=True)
    ]
    assert_close(found.returns, targets)


@settings(max_examples=80)
@given(answers=STEPS, gamma=GAMMAS, alpha=st.floats(0.01, 3))
def test_a_lambda_by_length_agrees_with_its_definition(
    answers: list[Answer], gamma: float, alpha: float
) -> None:
    found = gae(answers, gamma=gamma, length_adaptive_alpha=alpha, whiten=False).advantages
    lams = [max(0.0, 1 - 1 / (alpha * max(1, len(answer.kept)))) for answer in answers]
    each = zip(answers, lams, strict=True)
    assert_close(found, [by_definition(answer, gamma, lam) for answer, lam in each])


@settings(max_examples=80)
@given(answers=STEPS, gamma=GAMMAS, lam=SHARES)
def test_whitening_and_the_metric_agree_with_statistics(
    answers: list[Answer], gamma: float, lam: float
) -> None:
    raw = [by_definition(answer, gamma, lam) for answer in answers]
    tokens = [value for own in raw for value in own]
    assume(len(tokens) > 1)
    found = gae(answers, gamma=gamma, lam=lam)
    mean, std = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    white = [[(value - mean) / std for value in own] for own in raw]
    for own, want in zip(found.advantages, white, strict=True):
        assert own == pytest.approx(want, rel=1e-4, abs=1e-4)
    values = [token.value for answer in answers for token in answer.kept]
    targets = [part + value for part, value in zip(tokens, values, strict=True)]
    spread = statistics.variance(targets)
    assume(spread > 1e-6 * max(map(abs, targets + values)) ** 2)
    left = statistics.variance(t - v for t, v in zip(targets, values, strict=True))
    assert found.metrics[EXPLAINED] == pytest.approx(1 - left / spread, rel=1e-4, abs=1e-4)


@settings(max_examples=40)
@given(answers=STEPS, gamma=GAMMAS)
def test_the_ends_of_lambda(answers: list[Answer], gamma: float) -> None:
    """With 1 a target is all that was earned, without the critic's word; with 0 one step of it."""
    earned, stepped = [], []
    for answer in answers:
        to_come, own = end_of(answer), []
        for token in reversed(answer.kept):
            to_come = token.reward + gamma * to_come
            own.insert(0, to_come)
        earned.append(own)
        pairs = zip(answer.kept, values_behind(answer), strict=True)
        stepped.append([token.reward + gamma * behind for token, behind in pairs])
    assert_close(gae(answers, gamma=gamma, lam=1.0).returns, earned)
    assert_close(gae(answers, gamma=gamma, lam=0.0).returns, stepped)


@settings(max_examples=40)
@given(answers=STEPS, gamma=GAMMAS, lam=SHARES)
def test_without_the_tokens_of_tools_all_is_the_same(
    answers: list[Answer], gamma: float, lam: float
) -> None:
    without = [replace(answer, tokens=answer.kept) for answer in answers]
    found, expected = (gae(each, gamma=gamma, lam=lam) for each in (without, answers))
    assert replace(found, metrics={}) == replace(expected, metrics={})
    assert found.metrics == pytest.approx(expected.metrics, nan_ok=True, rel=0, abs=0)


def test_a_critic_that_knows_all_explains_all() -> None:
    step = [Answer(tokens_of([0, reward], [reward, reward])) for reward in (1.0, -2.0)]
    found = gae(step)
    assert found.advantages == [[0, 0], [0, 0]]
    assert found.metrics[EXPLAINED] == 1


@pytest.mark.parametrize("reward", [0.1, 1.0, 1e6 + 0.1])
@pytest.mark.parametrize("lam_critic", [None, 1.0])
def test_where_all_targets_are_the_same_nothing_is_to_explain(
    reward: float, lam_critic: float | None
) -> None:
    """They are sums of values, 0.3 + (0.1 - 0.3), so they may differ by a rounding error."""
    rewards = [0.0, 0.0, reward]
    step = [Answer(tokens_of(rewards, [v, -3 * v, v / 7])) for v in (0.3, 1.7, -2.9)]
    assert gae(step, lam_critic=lam_critic).metrics[EXPLAINED] == 0


def test_one_token_a_long_answer_and_nothing_at_all() -> None:
    alone = gae([Answer([Token(3.0, value=1.0)])])
    assert alone == Estimated([[0.0]], [[3.0]], {EXPLAINED: 0.0})
    nothing = gae([Answer([Token(trained=False)], last_value=5.0, truncated=True)] * 2)
    assert nothing == Estimated([[], []], [[], []], {EXPLAINED: 0.0})
    # Reward 1 behind 3000 tokens of value 0: A = 0.999^k.
    long = Answer(tokens_of([0.0] * 2999 + [1.0], [0.0] * 3000))
    found = gae([long, Answer([Token(1.0)])], gamma=0.999, whiten=False).advantages
    assert found[0] == pytest.approx([0.999**k for k in reversed(range(3000))], rel=1e-5)
    assert found[1] == [1]
