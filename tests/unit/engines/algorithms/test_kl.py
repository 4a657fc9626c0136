"""KL estimators by hand, against the exact KL of a categorical, and their gradients."""

import math

import pytest
import torch

from engines.algorithms.kl import kl_estimate
from engines.config.rows.algorithm import KL_ESTIMATORS
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


def test_k3_is_bounded():
    assert estimate("k3", -50.0) == 10.0
    assert estimate("k3", 15.0) == 10.0


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
