"""Losses over pairs: numbers worked by hand, second formulas, torch's autograd, extreme inputs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from engines.algorithms.preference.answers import Answers, PairLoss
from engines.algorithms.preference.options import (
    IpoOptions,
    OrpoOptions,
    PairOptions,
    SigmoidOptions,
    SimpoOptions,
)
from engines.algorithms.preference.pair_objective import (
    ODDS_BEND,
    PairInputs,
    ipo_loss,
    log_odds,
    orpo_loss,
    sigmoid_loss,
    simpo_loss,
)

LN_2, LN_3 = math.log(2), math.log(3)
LOSSES = {
    "sigmoid": (sigmoid_loss, SigmoidOptions()),
    "smoothed": (sigmoid_loss, SigmoidOptions(beta=0.3, label_smoothing=0.2)),
    "rpo": (sigmoid_loss, SigmoidOptions(likelihood_coef=1.0)),
    "ipo": (ipo_loss, IpoOptions()),
    "simpo": (simpo_loss, SimpoOptions()),
    "orpo": (orpo_loss, OrpoOptions()),
}
SUMS = st.floats(-60, -0.01)
SIZES = st.integers(1, 40)


def answers(sums: Tensor | list[float], sizes: list[int]) -> Answers:
    totals = torch.as_tensor(sums, dtype=torch.float64)
    return Answers(totals, torch.tensor(sizes), totals)


def one_pair(
    loss, options: PairOptions, chosen: tuple[float, int], rejected: tuple[float, int]
) -> PairLoss:
    """Of (sum, number of tokens) of either answer."""
    sides = (answers([total], [size]) for total, size in (chosen, rejected))
    return loss(PairInputs(*sides, options))


def value_and_slopes(
    loss, options: PairOptions, chosen: tuple[float, int], rejected: tuple[float, int]
) -> tuple[float, float, float]:
    """The loss, and its derivatives by the two sums."""
    leaves = [torch.tensor([each[0]], dtype=torch.float64).requires_grad_() for each in
              (chosen, rejected)]  # fmt: skip
    sides = [
        Answers(leaf, torch.tensor([each[1]]), leaf)
        for leaf, each in zip(leaves, (chosen, rejected), strict=True)
    ]
    found = loss(PairInputs(*sides, options)).loss_P.sum()
    slopes = torch.autograd.grad(found, leaves)
    return found.item(), slopes[0].item(), slopes[1].item()


def test_sigmoid_by_hand() -> None:
    """beta 0.5, log-ratios 2 ln 3 and 0: a margin of ln 3, whose sigmoid is 3/4.

    Smoothed by 0.2: -0.8 log(3/4) - 0.2 log(1/4).
    """
    found = one_pair(sigmoid_loss, SigmoidOptions(beta=0.5), (2 * LN_3, 7), (0.0, 1))
    assert found.loss_P.tolist() == pytest.approx([math.log(4 / 3)])
    assert found.chosen_reward_P.tolist() == pytest.approx([LN_3])
    assert found.rejected_reward_P.tolist() == [0.0]
    smoothed = SigmoidOptions(beta=0.5, label_smoothing=0.2)
    found = one_pair(sigmoid_loss, smoothed, (2 * LN_3, 7), (0.0, 1))
    assert found.loss_P.tolist() == pytest.approx([0.8 * math.log(4 / 3) + 0.2 * math.log(4)])


def test_sigmoid_loss_with_chosen_likelihood_term_by_hand() -> None:
    """Log-ratios 2 ln 3 and 0, log pi of the chosen one -6 over 3 tokens: log(4/3) + 0.5 * 2."""
    sums = ([2 * LN_3], [0.0])
    chosen, rejected = (
        Answers(torch.tensor(ratio), torch.tensor([3]), torch.tensor([-6.0])) for ratio in sums
    )
    options = SigmoidOptions(beta=0.5, likelihood_coef=0.5)
    found = sigmoid_loss(PairInputs(chosen, rejected, options))
    assert found.loss_P.tolist() == pytest.approx([math.log(4 / 3) + 1.0])


def test_ipo_by_hand() -> None:
    """Log-ratios 6 of 3 tokens and -2 of 4: means 2 and -0.5, apart by 2.5.

    beta 0.25 aims at 2: (2.5 - 2)^2 = 0.25; its slope by the chosen sum is 2 * 0.5 / 3, by the
    rejected one -2 * 0.5 / 4.
    """
    options = IpoOptions(beta=0.25)
    value, *slopes = value_and_slopes(ipo_loss, options, (6.0, 3), (-2.0, 4))
    assert value == pytest.approx(0.25)
    assert slopes == pytest.approx([1 / 3, -1 / 4])
    found = one_pair(ipo_loss, options, (6.0, 3), (-2.0, 4))
    assert found.chosen_reward_P.tolist() == pytest.approx([0.5])
    assert found.rejected_reward_P.tolist() == pytest.approx([-0.125])


def test_simpo_by_hand() -> None:
    """Log-probabilities -2 ln 2 of 2 tokens and -4 ln 2 of 1: means -ln 2 and -4 ln 2.

    beta 1 and gamma ln 2: 3 ln 2 - ln 2 = ln 4, whose sigmoid is 4/5.
    """
    options = SimpoOptions(beta=1.0, gamma=LN_2)
    found = one_pair(simpo_loss, options, (-2 * LN_2, 2), (-4 * LN_2, 1))
    assert found.loss_P.tolist() == pytest.approx([math.log(5 / 4)])
    assert found.chosen_reward_P.tolist() == pytest.approx([-LN_2])
    assert found.rejected_reward_P.tolist() == pytest.approx([-4 * LN_2])


def test_orpo_by_hand() -> None:
    """Tokens of probability 3/4 and 1/2: odds 3 and 1, their ratio 3, whose sigmoid of log is 3/4.

    beta 0.1: -log(3/4) - 0.1 log(3/4).
    """
    found = one_pair(orpo_loss, OrpoOptions(), (2 * math.log(3 / 4), 2), (-3 * LN_2, 3))
    assert found.loss_P.tolist() == pytest.approx([1.1 * math.log(4 / 3)])
    assert found.chosen_reward_P.tolist() == pytest.approx([0.1 * math.log(3 / 4)])


@given(SUMS, SIZES, SUMS, SIZES, st.floats(0.05, 3), st.floats(0, 0.45))
def test_sigmoid_is_the_cross_entropy_of_the_preference(
    chosen: float,
    num_chosen: int,
    rejected: float,
    num_rejected: int,
    beta: float,
    smoothing: float,
) -> None:
    """Of a coin that falls on the chosen side with 1 - e; its slope is beta (sigmoid - (1 - e))."""
    options = SigmoidOptions(beta=beta, label_smoothing=smoothing)
    value, *slopes = value_and_slopes(
        sigmoid_loss, options, (chosen, num_chosen), (rejected, num_rejected)
    )
    margin = torch.tensor(beta * (chosen - rejected), dtype=torch.float64)
    target = torch.tensor(1 - smoothing, dtype=torch.float64)
    assert value == pytest.approx(float(binary_cross_entropy_with_logits(margin, target)))
    slope = beta * (float(margin.sigmoid()) - (1 - smoothing))
    assert slopes == pytest.approx([slope, -slope], abs=1e-12)


@given(SUMS, SIZES, SUMS, SIZES, st.floats(0.05, 3), st.floats(0, 2))
def test_losses_of_means_are_their_papers_formulas(
    chosen: float, num_chosen: int, rejected: float, num_rejected: int, beta: float, gamma: float
) -> None:
    """In plain floats, with slopes as central differences."""
    sizes = (num_chosen, num_rejected)

    def ipo(chosen: float, rejected: float) -> float:
        h = math.fsum([chosen / sizes[0], -rejected / sizes[1]])
        return h * h - h / beta + 1 / (4 * beta * beta)

    def simpo(chosen: float, rejected: float) -> float:
        return math.log1p(math.exp(gamma - beta * (chosen / sizes[0] - rejected / sizes[1])))

    def orpo(chosen: float, rejected: float) -> float:
        p, q = math.exp(chosen / sizes[0]), math.exp(rejected / sizes[1])
        ratio = (p / (1 - p)) / (q / (1 - q))
        return -chosen / sizes[0] - beta * math.log(ratio / (1 + ratio))

    cases = (
        (ipo, ipo_loss, IpoOptions(beta=beta)),
        (simpo, simpo_loss, SimpoOptions(beta=beta, gamma=gamma)),
        (orpo, orpo_loss, OrpoOptions(beta=beta)),
    )
    step = 1e-5
    near_certain = max(chosen / num_chosen, rejected / num_rejected) > -2 * ODDS_BEND
    for formula, loss, options in cases:
        if near_certain and formula is orpo:
            continue  # there it is a straight line
        value, *slopes = value_and_slopes(
            loss, options, (chosen, num_chosen), (rejected, num_rejected)
        )
        assert value == pytest.approx(formula(chosen, rejected), rel=1e-9, abs=1e-9)
        wanted = [
            (formula(chosen + step, rejected) - formula(chosen - step, rejected)) / (2 * step),
            (formula(chosen, rejected + step) - formula(chosen, rejected - step)) / (2 * step),
        ]
        assert slopes == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_log_odds_go_on_as_a_straight_line_near_certainty() -> None:
    """The value and the slope of both pieces are one at the bend; at 0 it is finite."""
    just = torch.tensor([-ODDS_BEND * 1.000001, -ODDS_BEND * 0.999999, 0.0], dtype=torch.float64)
    just.requires_grad_()
    found = log_odds(just)
    (slopes,) = torch.autograd.grad(found.sum(), just)
    assert found[0].item() == pytest.approx(found[1].item(), abs=1e-5)
    # d/dl log(p / (1 - p)) = 1 / (1 - p).
    assert slopes.tolist() == pytest.approx([1 / -math.expm1(-ODDS_BEND)] * 3, rel=1e-5)
    assert found[2].item() == pytest.approx(found[1].item() + 1.0, rel=1e-4)
    assert float(log_odds(torch.tensor(-LN_2, dtype=torch.float64))) == pytest.approx(
        0.0, abs=1e-15
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("far", [1e4, -1e4, 0.0])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 5000), (0, 3), (3, 0), (0, 0)])
def test_extreme_answers_have_finite_losses_and_slopes(
    name: str, far: float, sizes: tuple[int, int]
) -> None:
    """An answer without a trained token sums to 0, whatever the other does."""
    loss, options = LOSSES[name]
    sums = [side if size else 0.0 for side, size in zip((far, -far), sizes, strict=True)]
    if not options.needs_reference:  # these are log-probabilities
        sums = [min(side, 0.0) for side in sums]
    found = value_and_slopes(loss, options, (sums[0], sizes[0]), (sums[1], sizes[1]))
    assert all(math.isfinite(number) for number in found)


@pytest.mark.parametrize("name", LOSSES)
def test_equal_answers_pull_the_chosen_up_and_the_rejected_down(name: str) -> None:
    loss, options = LOSSES[name]
    value, chosen_slope, rejected_slope = value_and_slopes(loss, options, (-3.0, 4), (-3.0, 4))
    assert math.isfinite(value)
    assert chosen_slope < 0 < rejected_slope
    found = one_pair(loss, options, (-3.0, 4), (-3.0, 4))
    assert found.chosen_reward_P.tolist() == found.rejected_reward_P.tolist()


def test_far_wrong_pairs_cost_their_margin() -> None:
    """-log sigmoid(-2000) is 2000, not infinity; smoothed far right ones cost their share of it."""
    options = SigmoidOptions(beta=0.1)
    assert value_and_slopes(sigmoid_loss, options, (-1e4, 1), (1e4, 1)) == pytest.approx(
        (2000.0, -0.1, 0.1)
    )
    options = SigmoidOptions(beta=0.1, label_smoothing=0.25)
    value, *_ = value_and_slopes(sigmoid_loss, options, (1e4, 1), (-1e4, 1))
    assert value == pytest.approx(500.0)


def test_options_of_another_loss_are_refused() -> None:
    with pytest.raises(TypeError, match="need IpoOptions"):
        one_pair(ipo_loss, SigmoidOptions(), (0.0, 1), (0.0, 1))


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (SigmoidOptions, {"beta": 0.0}),
        (SigmoidOptions, {"label_smoothing": 0.5}),
        (SigmoidOptions, {"label_smoothing": -0.1}),
        (SigmoidOptions, {"gamma": 1.0}),
        (IpoOptions, {"beta": math.inf}),
        (SimpoOptions, {"gamma": -1.0}),
        (OrpoOptions, {"beta": True}),
    ],
)
def test_options_out_of_range_are_refused(schema: type[PairOptions], values: dict) -> None:
    with pytest.raises(ValidationError):
        schema.model_validate(values)


def test_which_losses_need_a_reference() -> None:
    assert [options.needs_reference for _, options in LOSSES.values()] == [True] * 4 + [False] * 2
    assert not SigmoidOptions(reference_free=True).needs_reference
