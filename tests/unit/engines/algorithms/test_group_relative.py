"""Advantages of samples against their group: worked by hand, and the papers' formulas in floats."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.testing.algorithm_samples import Answer, Token, estimate_answers, outcome_of

EXACT = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.integers(-40, 40).map(lambda n: n / 8),
    # Sums of multiples of 1/1024 are exact up to here, so "equal" means the same to everyone.
    st.floats(-1e6, 1e6).map(lambda x: round(x * 1024) / 1024),
)
MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
OUTCOMES = st.lists(
    st.builds(outcome_of, EXACT, MASKS, st.sampled_from([0, 1, 2, 5])), min_size=1, max_size=14
)
PAID = st.builds(
    lambda mask, rewards, group: Answer(
        [Token(r * m, bool(m)) for m, r in zip(mask, rewards, strict=False)], group
    ),
    MASKS,
    st.lists(EXACT, min_size=6, max_size=6),
    st.integers(0, 3),
)
STEPS = st.one_of(OUTCOMES, st.lists(PAID, min_size=1, max_size=14))
"""Groups of any size, some empty; gaps between trained tokens, some answers without any."""
Oracle = Callable[[list[Answer], Answer], float]
"""Of a group and one of its answers."""
UNSCALED = {"norm_adv_by_std_in_grpo": False}


def of_samples(name: str, answers: Sequence[Answer], **switches: Any) -> list[float]:
    """The one value of each answer's trained tokens; NaN where it has none."""
    found = estimate_answers(name, answers, **switches).advantages
    assert all(len(set(values)) <= 1 for values in found)
    return [values[0] if values else math.nan for values in found]


def assert_agrees(found: list[float], answers: Sequence[Answer], oracle: Oracle) -> None:
    """What a formula says of each answer; exactly 0 in groups of equal scores."""
    for value, answer in zip(found, answers, strict=True):
        own = [other for other in answers if other.group == answer.group]
        if not answer.kept:
            assert math.isnan(value)
        elif len({each.outcome for each in own}) == 1:
            assert value == 0
        else:
            assert value == pytest.approx(oracle(own, answer), rel=1e-5, abs=1e-5)


def test_pass_at_k_by_hand() -> None:
    # Best 3, second 1: 2 / (std + 1e-6); deviations from the mean 4/3 are 5/3, -1/3, -4/3,
    # so the variance is (25 + 1 + 16) / 9 / 2 = 7/3 and the std 1.5275252.
    step = [outcome_of(score) for score in (1.0, 3.0, 0.0)]
    assert of_samples("grpo_passk", step) == pytest.approx([0, 2 / 1.5275262, 0], rel=1e-6)
    # Without the std the 2 alone. Of two that are best neither adds anything to the other.
    assert of_samples("grpo_passk", step, **UNSCALED) == [0, 2, 0]
    assert of_samples("grpo_passk", [*step, outcome_of(3.0)]) == [0] * 4
    # -1 against -4 adds 3; a sample without others adds to nothing.
    assert of_samples("grpo_passk", [outcome_of(-1.0), outcome_of(-4.0)], **UNSCALED) == [3, 0]
    assert of_samples("grpo_passk", [outcome_of(5.0)]) == [0]


def test_rloo_by_hand() -> None:
    # Against the mean of the others: 3 - (1 + 0)/2, 1 - (3 + 0)/2, 0 - (3 + 1)/2; the samples of
    # group 1 stand between them: 10 - 20 and 20 - 10.
    step = [
        outcome_of(3.0, [1, 0, 1]), outcome_of(10.0, group=1), outcome_of(1.0),
        outcome_of(20.0, [1, 1], group=1), outcome_of(0.0, [1] * 4),
    ]  # fmt: skip
    assert of_samples("rloo", step) == pytest.approx([2.5, -10, -0.5, 10, -2.0])


def test_opo_by_hand() -> None:
    # Trained tokens 3 and 1 (a tool's do not count): baseline (3 x 1 + 1 x 0) / 4 = 0.75.
    step = [outcome_of(1.0, [1, 1, 0, 0, 1]), outcome_of(0.0, [0, 1])]
    assert of_samples("opo", step) == pytest.approx([0.25, -0.75])
    # One answer of 999 tokens: baseline (999 x 1 + 1 x 0) / 1000.
    long = [outcome_of(1.0, [1] * 999), outcome_of(0.0)]
    assert of_samples("opo", long) == pytest.approx([0.001, -0.999])


def test_gpg_by_hand() -> None:
    # Of six samples three teach nothing, two in a group of equal scores and one alone:
    # alpha = 6 / 3 = 2. Group 0: mean 1, centred 1, 0, -1, by f_norm 0.5 doubled again.
    step = [outcome_of(s, group=g) for s, g in ((2, 0), (1, 0), (0, 0), (7, 1), (7, 1), (9, 2))]
    found = estimate_answers("gpg", step, options={"f_norm": 0.5})
    assert [values[0] for values in found.advantages] == pytest.approx([4, 0, -4, 0, 0, 0])
    assert found.metrics == {"critic/gpg_alpha": 2.0}
    nothing = estimate_answers("gpg", step[3:])
    assert nothing.advantages == [[0.0]] * 3
    assert math.isfinite(nothing.metrics["critic/gpg_alpha"])


def by_rloo(own: list[Answer], answer: Answer) -> float:
    others = [other.outcome for other in own if other is not answer]
    return answer.outcome - sum(others) / len(others)


def by_opo(own: list[Answer], answer: Answer) -> float:
    earned = [each.outcome for each in own for _ in each.kept]
    return answer.outcome - statistics.fmean(earned)


def by_passk(own: list[Answer], answer: Answer) -> float:
    second, best = sorted(each.outcome for each in own)[-2:]
    return best - second if answer.outcome == best else 0.0


def by_scaled_passk(own: list[Answer], answer: Answer) -> float:
    return by_passk(own, answer) / (statistics.stdev(each.outcome for each in own) + 1e-6)


def by_centring(own: list[Answer], answer: Answer) -> float:
    return answer.outcome - statistics.fmean(each.outcome for each in own)


CASES: list[tuple[str, dict[str, Any], Oracle]] = [
    ("rloo", {}, by_rloo),
    ("opo", {}, by_opo),
    ("grpo_passk", {}, by_scaled_passk),
    ("grpo_passk", UNSCALED, by_passk),
    ("grpo", UNSCALED, by_centring),
]


@pytest.mark.parametrize(("name", "switches", "oracle"), CASES)
@settings(max_examples=40)
@given(answers=STEPS)
def test_agrees_with_plain_floats(
    name: str, switches: dict[str, Any], oracle: Oracle, answers: list[Answer]
) -> None:
    assert_agrees(of_samples(name, answers, **switches), answers, oracle)


@settings(max_examples=40)
@given(answers=STEPS, f_norm=st.floats(0.25, 4))
def test_gpg_agrees_with_plain_floats(answers: list[Answer], f_norm: float) -> None:
    sizes: dict[int, set[float]] = {}
    for answer in answers:
        sizes.setdefault(answer.group, set()).add(answer.outcome)
    teaching = sum(len(sizes[answer.group]) > 1 for answer in answers)
    factor = len(answers) / teaching / f_norm if teaching else 0.0
    found = of_samples("gpg", answers, options={"f_norm": f_norm})
    assert_agrees(found, answers, lambda own, answer: factor * by_centring(own, answer))


@settings(max_examples=40)
@given(answers=STEPS)
def test_what_the_values_of_a_group_add_up_to(answers: list[Answer]) -> None:
    answers = [answer for answer in answers if answer.kept]
    names = ("rloo", "gpg", "opo", "grpo_passk")
    for group in {answer.group for answer in answers}:
        mine = [place for place, answer in enumerate(answers) if answer.group == group]
        rloo, gpg, opo, best = ([of_samples(n, answers)[i] for i in mine] for n in names)
        weighted = [value * len(answers[i].kept) for i, value in zip(mine, opo, strict=True)]
        for values in (rloo, gpg, weighted):
            size = sum(map(abs, values))
            assert sum(values) == pytest.approx(0, abs=1e-6 * size + 1e-9)
        assert min(best) >= 0
        assert sum(value > 0 for value in best) <= 1


@pytest.mark.parametrize("name", ["rloo", "opo", "grpo_passk", "grpo"])
@settings(max_examples=40)
@given(answers=OUTCOMES, more=OUTCOMES)
def test_other_groups_change_nothing(name: str, answers: list[Answer], more: list[Answer]) -> None:
    others = [replace(answer, group=answer.group + 6) for answer in more]
    alone = estimate_answers(name, answers).advantages
    assert estimate_answers(name, [*others, *answers]).advantages[len(more) :] == alone


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
@settings(max_examples=40)
@given(score=st.floats(-1e6, 1e6), masks=st.lists(MASKS, min_size=1, max_size=9))
def test_equal_scores_give_exactly_zero(name: str, score: float, masks: list[list[int]]) -> None:
    answers = [outcome_of(score, mask) for mask in masks if any(mask)]
    if answers:
        assert not any(map(any, estimate_answers(name, answers).advantages))


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
def test_a_step_in_which_nothing_is_trained_gives_nothing(name: str) -> None:
    step = [outcome_of(1.0, [0]), outcome_of(0.0, [0, 0])]
    assert estimate_answers(name, step).advantages == [[], []]
