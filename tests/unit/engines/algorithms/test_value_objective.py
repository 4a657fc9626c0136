"""The critic's loss against numbers worked by hand and plain floats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.algorithms.policy_objective import ValueObjective
from engines.types import GlobalCounts, ModelOutputs, TokenBatch

FLOATS = st.floats(-3, 3, width=32)


def batch_of(values: list[float], returns: list[float], mask: list[float]) -> TokenBatch:
    """One sequence with the values of before."""
    return TokenBatch.from_sequences(
        [[5] * len(values)], loss_mask=[mask], values=[values], returns=[returns]
    )


def outputs_of(values: list[float]) -> tuple[ModelOutputs, torch.Tensor]:
    values_T = torch.tensor(values, requires_grad=True)
    return ModelOutputs(torch.zeros(len(values)), values_T=values_T), values_T


def test_by_hand() -> None:
    """Clip 0.5 around 1.0; four trained tokens.

    V = 1.2, R = 2.0: inside, 0.8^2 = 0.64.
    V = 1.8, R = 2.0: clipped to 1.5: max(0.04, 0.25) = 0.25, no gradient.
    V = 1.8, R = 1.0: clipped to 1.5: max(0.64, 0.25) = 0.64, the gradient pulls it back.
    V = 0.2, R = 0.0: clipped to 0.5: max(0.04, 0.25) = 0.25, no gradient.
    Half their mean: (0.64 + 0.25 + 0.64 + 0.25) / 4 / 2 = 0.2225; two of four are clipped.
    dL/dV = (V - R) / 4 where there is one: -0.2, 0, 0.2, 0; the prompt has none.
    """
    outputs, values_T = outputs_of([9.0, 1.2, 1.8, 1.8, 0.2])
    batch = batch_of([1.0] * 5, [0.0, 2.0, 2.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0, 1.0])
    found = ValueObjective(0.5)(outputs, batch, GlobalCounts(4, 1))
    assert float(found.loss.detach()) == pytest.approx(0.2225)
    assert float(found.metrics["critic/vf_clipfrac"]) == pytest.approx(0.5)
    assert float(found.metrics["critic/vpred_mean"]) == pytest.approx((1.2 + 1.8 + 1.8 + 0.2) / 4)
    found.loss.backward()
    assert values_T.grad is not None
    assert values_T.grad.tolist() == pytest.approx([0, -0.2, 0, 0.2, 0], abs=1e-6)


@given(
    rows=st.lists(st.tuples(FLOATS, FLOATS, FLOATS, st.booleans()), min_size=1, max_size=6),
    cliprange=st.none() | st.sampled_from([0.1, 0.5, 2.0]),
)
def test_it_is_its_formula_and_its_slope(
    rows: list[tuple[float, float, float, bool]], cliprange: float | None
) -> None:
    now, before, returns, trained = (list(column) for column in zip(*rows, strict=True))
    num_tokens = sum(trained) or 1
    outputs, values_T = outputs_of(now)
    batch = batch_of(before, returns, [float(flag) for flag in trained])
    found = ValueObjective(cliprange)(outputs, batch, GlobalCounts(num_tokens, 1))
    total, slopes = 0.0, []
    for value, old, target, flag in rows:
        plain, slope = (value - target) ** 2, 2 * (value - target)
        if cliprange is not None:
            near = min(max(value, old - cliprange), old + cliprange)
            if (near - target) ** 2 > plain:
                plain, slope = (near - target) ** 2, 0.0
        total += 0.5 * plain * flag / num_tokens
        slopes.append(0.5 * slope * flag / num_tokens)
    assert float(found.loss.detach()) == pytest.approx(total, abs=1e-5)
    found.loss.backward()
    assert values_T.grad is not None
    for (value, old, target, _), slope, want in zip(
        rows, values_T.grad.tolist(), slopes, strict=True
    ):
        # Where both forms are equal, either slope is one; rounding decides.
        edge = cliprange is not None and (
            abs(abs(value - old) - cliprange) < 1e-4
            or abs(
                abs(value - target)
                - abs(min(max(value, old - cliprange), old + cliprange) - target)
            )
            < 1e-4
        )
        assert edge or slope == pytest.approx(want, abs=1e-5)


def test_a_language_model_has_no_values() -> None:
    batch = batch_of([0.0], [0.0], [1.0])
    with pytest.raises(ValueError, match="needs a value model"):
        ValueObjective()(ModelOutputs(torch.zeros(1)), batch, GlobalCounts(1, 1))
