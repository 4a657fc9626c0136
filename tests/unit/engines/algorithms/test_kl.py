"""KL estimators by hand, against the exact KL of a categorical, and their gradients."""

import math

import pytest
import torch

from engines.algorithms.kl import kl_estimate
from engines.config.rows import KL_ESTIMATORS
from infra.errors import UnknownPluginError


def estimate(name: str, d: float) -> float:
    return kl_estimate(name, torch.tensor([-1.0]), torch.tensor([-1.0 - d])).item()


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (("k1", "kl", "k1+", "kl+"), -0.5),
        (("abs", "abs+"), 0.5),
        (("k2", "mse", "k2+", "mse+"), 0.125),
        (("k3", "low_var_kl", "k3+", "low_var_kl+"), math.exp(0.5) - 1 - 0.5),
    ],
)
def test_values_by_hand(names, want):
    for name in names:
        assert estimate(name, -0.5) == pytest.approx(want, rel=1e-6)


def test_k3_pulls_on_where_the_policy_ran_away():
    """Up to -2.6104, where it is 10, the formula; then its tangent, slope 1 - e^2.6104 = -12.6."""
    for d in (-0.5, -2.6, -2.7, -50.0):
        logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        value = kl_estimate("k3", logprob, torch.tensor([-1.0 - d], dtype=torch.float64))
        (slope,) = torch.autograd.grad(value.sum(), logprob)
        bend = max(d, -2.6104)
        assert slope.item() == pytest.approx(1 - math.exp(-bend), rel=1e-9)
        tangent = (math.exp(2.6104) - 1) * (bend - d)
        assert value.item() == pytest.approx(math.exp(-bend) - 1 + bend + tangent, rel=1e-9)
    assert estimate("k3", -2.6104) == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("d", [-60.0, 60.0])
def test_every_estimate_is_finite_and_pulls_back_far_away(name, d):
    logprob = torch.tensor([-1.0], requires_grad=True)
    value = kl_estimate(name, logprob, torch.tensor([-1.0 - d]))
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    assert torch.isfinite(value).all()
    assert abs(slope.item()) >= 0.99
    if name != "k1":
        assert slope.sign().item() == math.copysign(1, d)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_on_a_categorical(name):
    # The expectation is taken exactly, by summing over the four outcomes.
    logprobs = torch.tensor([1.0, 0.2, -0.3, 0.7], dtype=torch.float64).log_softmax(-1)
    reference = torch.tensor([0.1, 0.9, -0.8, 0.4], dtype=torch.float64).log_softmax(-1)
    exact = torch.nn.functional.kl_div(reference, logprobs, log_target=True, reduction="sum")
    mean = (logprobs.exp() * kl_estimate(name, logprobs, reference)).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=1e-9)


@pytest.mark.parametrize("name", ["k1+", "k2", "k3+", "abs+"])
def test_the_expected_gradient_is_that_of_the_kl(name):
    logits = torch.tensor([1.0, 0.2, -0.3, 0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.9, -0.8, 0.4], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    weights = logprobs.detach().exp()
    sampled = (weights * kl_estimate(name, logprobs, reference)).sum()
    (got,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(got, want)


def test_the_expected_gradient_of_plain_k1_is_zero():
    logits = torch.tensor([1.0, 0.2, -0.3], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    estimate_V = kl_estimate("k1", logprobs, torch.full((3,), -1.0986, dtype=torch.float64))
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * estimate_V).sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64))


def test_an_unknown_name_is_refused():
    with pytest.raises(UnknownPluginError, match="no 'k4'"):
        kl_estimate("k4+", torch.zeros(1), torch.zeros(1))
    assert "full" not in KL_ESTIMATORS.names()
