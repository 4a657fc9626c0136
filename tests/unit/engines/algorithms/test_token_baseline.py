"""A baseline for each token or turn: by hand, and the paper's weighted mean in plain floats."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.testing.algorithm_samples import Answer, Token, estimate_answers, outcome_of

BY_TOKEN, BY_TURN = "optimal_token_baseline", "tir_optimal_token_baseline"
BOTH = pytest.mark.parametrize("name", [BY_TOKEN, BY_TURN])
SIZES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-2, 2), st.floats(-1e6, 1e6))


def drawn(trained: bool, reward: float, chosen: float, share: float) -> Token:
    """The chosen token's own square, and up to all the rest of the probability in one other."""
    squares = chosen**2 + share * (1 - chosen) ** 2
    return Token(reward * trained, trained, chosen=chosen, squares=squares)


TOKENS = st.builds(
    drawn,
    st.integers(0, 3).map(bool),
    st.one_of(st.just(0.0), SIZES),
    st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    st.floats(0, 1),
)
ANSWERS = st.builds(Answer, st.lists(TOKENS, min_size=1, max_size=8), st.sampled_from([0, 1, 4]))
STEPS = st.lists(ANSWERS, min_size=1, max_size=8)
"""Ragged groups, some of one or empty; tools between the tokens; tokens without any energy."""
Oracle = Callable[[Answer, Sequence[Answer]], list[float]]
"""Of an answer and its group."""
MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def returns_of(answer: Answer) -> list[float]:
    """What each trained token still earns."""
    rewards = [token.reward for token in answer.kept]
    return [sum(rewards[place:]) for place in range(len(rewards))]


def energies_of(answer: Answer) -> list[float]:
    """Of the answer up to each trained token: the sum of 1 - 2 pi + sum of pi^2."""
    own = [1 - 2 * token.chosen + token.squares for token in answer.kept]
    return [sum(own[: place + 1]) for place in range(len(own))]


def turns_of(answer: Answer) -> list[list[int]]:
    """Places, among the trained tokens, of those that stand in a row."""
    found: list[list[int]] = []
    before, place = False, 0
    for token in answer.tokens:
        if token.trained:
            if not before:
                found.append([])
            found[-1].append(place)
            place += 1
        before = token.trained
    return found


def weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    """Their mean by weight; without weights where there is no weight at all."""
    if sum(weights) < 1e-9:
        return statistics.fmean(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def by_tokens(answer: Answer, group: Sequence[Answer]) -> list[float]:
    found = []
    for place, value in enumerate(returns_of(answer)):
        there = [other for other in group if len(other.kept) > place]
        values = [returns_of(other)[place] for other in there]
        found.append(value - weighted(values, [energies_of(other)[place] for other in there]))
    return found


def by_turns(answer: Answer, group: Sequence[Answer]) -> list[float]:
    found: list[float] = []
    for number, places in enumerate(turns_of(answer)):
        there = [other for other in group if len(turns_of(other)) > number]
        values = [returns_of(other)[turns_of(other)[number][0]] for other in there]
        weights = [energies_of(other)[turns_of(other)[number][-1]] for other in there]
        baseline = weighted(values, weights)
        found += [returns_of(answer)[place] - baseline for place in places]
    return found


# Energies: first answer 1 - 2 x 0.5 + 0.5 = 0.5 and again 0.5; second 1 - 2 x 0.2 + 0.3 = 0.9.
FIRST = Answer([Token(), Token(1.0)])
SECOND = Answer([Token(chosen=0.2, squares=0.3)])
TOOL = Token(trained=False, chosen=0.1, squares=0.9)


def test_by_tokens_by_hand() -> None:
    # At token 0 returns 1 and 0 with the weights 0.5 and 0.9: baseline 0.5 / 1.4. At token 1 the
    # first answer is alone.
    found = estimate_answers(BY_TOKEN, [FIRST, SECOND]).advantages
    assert found == [pytest.approx([0.9 / 1.4, 0]), pytest.approx([-0.5 / 1.4])]
    # A third of two tokens and the energies 0.9, 0.9 + 0.5: at token 0 the weights 0.5, 0.9, 0.9
    # for 1, 0, 0; at token 1 1.0 and 1.4 for 1 and 0, whose mean is 1 / 2.4.
    third = Answer([*SECOND.tokens, TOOL, Token()])
    found = estimate_answers(BY_TOKEN, [FIRST, SECOND, third]).advantages
    assert found[0] == pytest.approx([1.8 / 2.3, 1.4 / 2.4])
    assert found[1] == pytest.approx([-0.5 / 2.3])
    assert found[2] == pytest.approx([-0.5 / 2.3, -1 / 2.4])


def test_by_turns_by_hand() -> None:
    # The first answer's turn holds both tokens: one baseline, by the energy 1.0 at its end.
    found = estimate_answers(BY_TURN, [FIRST, SECOND]).advantages
    assert found == [pytest.approx([0.9 / 1.9] * 2), pytest.approx([-1 / 1.9])]
    # Two turns each, of 2 + 1 and 1 + 1 tokens. First turn: returns 1 and 4, energies 1.0 and 0.9,
    # baseline (1 + 3.6) / 1.9 = 4.6 / 1.9. Second: returns 1 and 4, energies 1.5 and 0.9 + 0.5 =
    # 1.4, baseline (1.5 + 5.6) / 2.9 = 7.1 / 2.9.
    one = Answer([Token(), Token(), TOOL, TOOL, Token(1.0), TOOL])
    other = Answer([TOOL, *SECOND.tokens, TOOL, Token(4.0)])
    found = estimate_answers(BY_TURN, [one, other]).advantages
    assert found[0] == pytest.approx([1 - 4.6 / 1.9, 1 - 4.6 / 1.9, 1 - 7.1 / 2.9])
    assert found[1] == pytest.approx([4 - 4.6 / 1.9, 4 - 7.1 / 2.9])


def test_within_a_turn_the_return_to_go_still_changes_by_hand() -> None:
    # Rewards 2 and 1 in one turn: returns 3, 1 against one baseline, of 3 with the energy 1.0 and 0
    # with 0.9: 3 / 1.9.
    paid = Answer([Token(2.0), Token(1.0)])
    found = estimate_answers(BY_TURN, [paid, SECOND]).advantages
    assert found == [pytest.approx([3 - 3 / 1.9, 1 - 3 / 1.9]), pytest.approx([-3 / 1.9])]


@BOTH
def test_where_every_token_was_certain_the_mean_has_no_weights(name: str) -> None:
    certain = [Answer([Token(score, chosen=1.0, squares=1.0)]) for score in (1.0, 0.0, 5.0)]
    assert estimate_answers(name, certain).advantages == [[-1.0], [-2.0], [3.0]]
    # One that was not certain has all the weight.
    found = estimate_answers(name, [*certain, outcome_of(7.0)]).advantages
    assert found == [[-6.0], [-7.0], [-2.0], [0.0]]


@pytest.mark.parametrize(("name", "oracle"), [(BY_TOKEN, by_tokens), (BY_TURN, by_turns)])
@settings(max_examples=100)
@given(answers=STEPS)
def test_agrees_with_plain_floats(name: str, oracle: Oracle, answers: list[Answer]) -> None:
    found = estimate_answers(name, answers).advantages
    for answer, own in zip(answers, found, strict=True):
        group = [other for other in answers if other.group == answer.group]
        largest = max((abs(v) for other in group for v in returns_of(other)), default=0.0)
        assert own == pytest.approx(oracle(answer, group), rel=1e-5, abs=1e-7 * largest + 1e-7)


@settings(max_examples=60)
@given(answers=STEPS)
def test_what_the_values_of_a_group_add_up_to_at_each_token(answers: list[Answer]) -> None:
    """By weight to nothing: that is what makes the baseline the optimal one."""
    found = estimate_answers(BY_TOKEN, answers).advantages
    for group in {answer.group for answer in answers}:
        mine = [(a, v) for a, v in zip(answers, found, strict=True) if a.group == group]
        for place in range(8):
            terms = [energies_of(a)[place] * v[place] for a, v in mine if len(v) > place]
            assert sum(terms) == pytest.approx(0, abs=1e-5 * sum(map(abs, terms)) + 1e-7)


@settings(max_examples=40)
@given(answers=STEPS)
def test_by_tokens_a_tool_is_passed_over(answers: list[Answer]) -> None:
    without = [replace(answer, tokens=answer.kept) for answer in answers]
    assert estimate_answers(BY_TOKEN, without) == estimate_answers(BY_TOKEN, answers)


@settings(max_examples=40)
@given(answers=STEPS)
def test_turns_of_one_token_each_have_the_baselines_of_tokens(answers: list[Answer]) -> None:
    apart = [
        replace(answer, tokens=[each for token in answer.tokens for each in (token, TOOL)])
        for answer in answers
    ]
    assert estimate_answers(BY_TURN, apart) == estimate_answers(BY_TOKEN, answers)


@BOTH
@settings(max_examples=40)
@given(score=st.floats(-1e6, 1e6), masks=st.lists(MASKS, min_size=1, max_size=8))
def test_equal_scores_give_exactly_zero(name: str, score: float, masks: list[list[int]]) -> None:
    answers = [outcome_of(score, mask) for mask in masks]
    assert not any(map(any, estimate_answers(name, answers).advantages))


@BOTH
def test_a_step_in_which_nothing_is_trained_gives_nothing(name: str) -> None:
    step = [outcome_of(1.0, [0]), outcome_of(0.0, [0, 0])]
    assert estimate_answers(name, step).advantages == [[], []]


@BOTH
def test_a_long_answer_against_one_of_a_single_token(name: str) -> None:
    # Each token has the energy 0.5. By tokens: at the first, weights 0.5 and 0.5 for 1 and 0; then
    # the long one is alone. By turns: weights 1500 and 0.5, so the baseline is 1500 / 1500.5.
    found = estimate_answers(name, [outcome_of(1.0, [1] * 3000), outcome_of(0.0)]).advantages
    wanted = {BY_TOKEN: [0.5] + [0.0] * 2999, BY_TURN: [0.5 / 1500.5] * 3000}[name]
    assert found[0] == pytest.approx(wanted, rel=1e-4)
    assert found[1] == pytest.approx([wanted[0] - 1])
