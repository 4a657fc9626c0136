"""Advantages whitened over the step: GDPO, REINFORCE++ with a baseline; by hand, and in floats."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rlhf.testing.algorithm_samples import Answer, Token, estimate_answers, outcome_of

EXACT = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.integers(-40, 40).map(lambda n: n / 8),
    # Sums of multiples of 1/1024 are exact up to here, so "equal" means the same to everyone.
    st.floats(-1e6, 1e6).map(lambda x: round(x * 1024) / 1024),
)
MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
GROUPS = st.sampled_from([0, 1, 2, 5])
STEPS = st.lists(st.builds(outcome_of, EXACT, MASKS, GROUPS), min_size=1, max_size=14)
APART = st.lists(
    st.builds(outcome_of, st.integers(-40, 40), MASKS, GROUPS), min_size=1, max_size=14
)
"""Scores so far from each other that the eps of 1e-8 in a variance takes nothing."""
NAMES = ("length", "format", "score")
SCORED_STEPS = st.lists(
    st.builds(
        lambda answer, scores: replace(answer, scores=scores),
        st.builds(outcome_of, EXACT, MASKS, GROUPS),
        st.tuples(EXACT, EXACT, EXACT),
    ),
    min_size=1,
    max_size=14,
)
"""Every answer has three components of a score, whose sum is not its outcome."""


def with_scores(scores: Sequence[float], length: int = 1, group: int = 0) -> Answer:
    return replace(outcome_of(sum(scores), [1] * length, group), scores=tuple(scores))


def whitened(step: list[list[float]]) -> list[list[float]]:
    """Mean 0 and variance 1 over all tokens of the step."""
    tokens = [value for values in step for value in values]
    if len(set(tokens)) < 2:
        return [[0.0] * len(values) for values in step]
    mean, std = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    return [[(value - mean) / std for value in values] for values in step]


def in_group(values: Sequence[float], groups: Sequence[int], by_std: bool) -> list[float]:
    """Each less its group's mean, perhaps by its std; 0 in groups of equal values."""
    found = []
    for value, group in zip(values, groups, strict=True):
        own = [v for v, g in zip(values, groups, strict=True) if g == group]
        if len(set(own)) == 1:
            found.append(0.0)
        else:
            scale = statistics.stdev(own) + 1e-6 if by_std else 1.0
            found.append((value - statistics.fmean(own)) / scale)
    return found


def on_tokens(values: Sequence[float], answers: Sequence[Answer]) -> list[list[float]]:
    return [[value] * len(a.kept) for value, a in zip(values, answers, strict=True)]


def assert_close(found: list[list[float]], wanted: list[list[float]]) -> None:
    for values, want in zip(found, wanted, strict=True):
        assert values == pytest.approx(want, rel=1e-4, abs=1e-4)


def test_reinforce_plus_plus_with_baseline_by_hand() -> None:
    # Centred 1/2 on 1 token and -1/2 on 3: mean -1/4; deviations 3/4, -1/4 (three times), so the
    # variance is (9/16 + 3/16) / 3 = 1/4: divided by 1/2.
    step = [outcome_of(1.0), outcome_of(0.0, [1, 0, 1, 1])]
    found = estimate_answers("reinforce_plus_plus_baseline", step).advantages
    assert_close(found, [[1.5], [-0.5] * 3])
    # A third answer, alone in its group: 0 before whitening, so tokens 1/2, -1/2 x 3, 0 have mean
    # -1/5, deviations 7/10, -3/10 x 3, 2/10, variance (49 + 27 + 4) / 100 / 4 = 1/5.
    found = estimate_answers("reinforce_plus_plus_baseline", [*step, outcome_of(9, group=1)])
    root = math.sqrt(5)
    assert_close(found.advantages, [[0.7 * root], [-0.3 * root] * 3, [0.2 * root]])


def test_gdpo_gives_a_component_of_a_small_range_its_weight() -> None:
    # Scores of +-100 and +-0.01: each component becomes +-sqrt(3)/2, for four +-1 have the std
    # sqrt(4/3). Sums sqrt(3), 0, 0, -sqrt(3), of variance 6/3: divided by sqrt(2).
    step = [with_scores((big, small)) for big in (100.0, -100.0) for small in (0.01, -0.01)]
    options = {"gdpo_reward_keys": ("big", "small")}
    found = estimate_answers("gdpo", step, ("big", "small"), options=options).advantages
    # The eps of 1e-6 takes 1e-4 from the small one, whose std is 0.0115.
    assert_close(found, [[math.sqrt(1.5)], [0], [0], [-math.sqrt(1.5)]])
    # Weighted 2 and 1: in units of sqrt(3)/2 sums 3, 1, -1, -3, of variance 20/3 x 3/4 = 5.
    options = {"gdpo_reward_keys": ("big", "small"), "gdpo_reward_weights": (2.0, 1.0)}
    found = estimate_answers("gdpo", step, ("big", "small"), options=options).advantages
    unit = math.sqrt(3) / 2 / math.sqrt(5)
    assert_close(found, [[3 * unit], [unit], [-unit], [-3 * unit]])


def test_gdpo_whitens_over_tokens_by_hand() -> None:
    # Two scores 1 and 0 are +-1/2 over a std of sqrt(1/2), which is +-sqrt(1/2), on 1 and 3 tokens:
    # mean -sqrt(1/2)/2; deviations 3/2 and -1/2 of sqrt(1/2): variance (9/4 + 3/4) / 3 / 2 = 1/2.
    step = [with_scores((1.0,)), with_scores((0.0,), 3)]
    assert_close(estimate_answers("gdpo", step, ("score",)).advantages, [[1.5], [-0.5] * 3])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gdpo_reward_keys": ("absent",)}, r"got gdpo_reward_keys \('absent',\); need some of"),
        ({}, r"got gdpo_reward_keys None; need some of .*\['big', 'small'\]"),
    ],
)
def test_gdpo_refuses_components_that_the_reward_does_not_give(
    options: dict[str, tuple[float, ...]], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        estimate_answers("gdpo", [with_scores((1.0, 2.0))], ("big", "small"), options=options)


@settings(max_examples=80)
@given(answers=STEPS)
def test_reinforce_plus_plus_baseline_agrees_with_plain_floats(answers: list[Answer]) -> None:
    groups = [answer.group for answer in answers]
    centred = in_group([answer.outcome for answer in answers], groups, by_std=False)
    found = estimate_answers("reinforce_plus_plus_baseline", answers).advantages
    assert_close(found, whitened(on_tokens(centred, answers)))


@settings(max_examples=80)
@given(
    answers=SCORED_STEPS,
    keys=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    weights=st.one_of(st.none(), st.lists(st.floats(0.1, 3), min_size=3, max_size=3)),
)
def test_gdpo_agrees_with_plain_floats(
    answers: list[Answer], keys: list[str], weights: list[float] | None
) -> None:
    used = [1.0] * len(keys) if weights is None else weights[: len(keys)]
    groups, totals = [answer.group for answer in answers], [0.0] * len(answers)
    for key, weight in zip(keys, used, strict=True):
        column = [answer.scores[NAMES.index(key)] for answer in answers]
        parts = in_group(column, groups, by_std=True)
        totals = [total + weight * part for total, part in zip(totals, parts, strict=True)]
    options = {
        "gdpo_reward_keys": tuple(keys),
        "gdpo_reward_weights": weights and tuple(used),
    }
    found = estimate_answers("gdpo", answers, NAMES, options=options).advantages
    assert_close(found, whitened(on_tokens(totals, answers)))


@settings(max_examples=40)
@given(answers=SCORED_STEPS, payment=EXACT)
def test_gdpo_knows_no_rewards_but_the_components(answers: list[Answer], payment: float) -> None:
    """A KL in the reward is paid by the tokens, so it does not count."""
    paying = [
        replace(a, tokens=[Token(payment * t.trained, t.trained) for t in a.tokens])
        for a in answers
    ]
    options = {"gdpo_reward_keys": ("length", "format")}
    first, second = (
        estimate_answers("gdpo", step, NAMES, options=options) for step in (answers, paying)
    )
    assert first == second


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline"])
@settings(max_examples=40)
@given(answers=APART)
def test_the_tokens_of_a_step_have_mean_0_and_variance_1(name: str, answers: list[Answer]) -> None:
    tokens = [value for own in estimate_answers(name, answers).advantages for value in own]
    # Scores that differ by rounding alone stay small: the divisor's epsilon is larger than they.
    assume(any(abs(value) > 0.02 for value in tokens))
    assert statistics.fmean(tokens) == pytest.approx(0, abs=1e-5)
    assert statistics.variance(tokens) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline"])
@settings(max_examples=40)
@given(scores=st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6), answers=STEPS)
def test_a_step_whose_groups_all_agree_gives_exactly_zero(
    name: str, scores: list[float], answers: list[Answer]
) -> None:
    mask = [[token.trained for token in answer.tokens] for answer in answers]
    step = [
        outcome_of(scores[answer.group], own, answer.group)
        for answer, own in zip(answers, mask, strict=True)
        if any(own)
    ]
    assume(step)
    assert not any(map(any, estimate_answers(name, step).advantages))


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline"])
def test_a_step_in_which_nothing_is_trained_gives_nothing(name: str) -> None:
    step = [outcome_of(1.0, [0]), outcome_of(0.0, [0, 0])]
    assert estimate_answers(name, step).advantages == [[], []]
