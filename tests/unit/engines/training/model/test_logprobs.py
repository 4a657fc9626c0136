"""Token log-probabilities against torch.distributions, and their gradients against numbers."""

import pytest
import torch

from engines.training.model import logprobs
from engines.training.model.logprobs import token_logprobs


@pytest.fixture(params=[1 << 24, 40], ids=["one_chunk", "many_chunks"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients(temperature: float, entropy: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(23, 13, generator=generator, requires_grad=True)
    tokens = torch.randint(0, 13, (23,), generator=generator)
    weights = torch.randn(2, 23, generator=generator)
    ours, ours_entropy, squares = token_logprobs(
        logits, tokens, temperature=temperature, entropy=entropy, sum_pi_squared=True
    )
    wanted = torch.distributions.Categorical(logits=logits / temperature)
    assert squares is not None
    assert not squares.requires_grad
    assert torch.allclose(squares, wanted.probs.detach().square().sum(-1), atol=1e-6)
    assert torch.allclose(ours, wanted.log_prob(tokens), atol=1e-6)
    assert (ours_entropy is not None) == entropy
    objective, expected = (ours * weights[0]).sum(), (wanted.log_prob(tokens) * weights[0]).sum()
    if ours_entropy is not None:
        assert torch.allclose(ours_entropy, wanted.entropy(), atol=1e-6)
        objective = objective + (ours_entropy * weights[1]).sum()
        expected = expected + (wanted.entropy() * weights[1]).sum()
    (grad,) = torch.autograd.grad(objective, logits)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(grad, expected_grad, atol=1e-6)


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986123]], requires_grad=True)  # 1.0986 = log 3
    values, entropy, _ = token_logprobs(logits, torch.tensor([0, 1]), entropy=True)
    assert values.tolist() == pytest.approx([-0.6931472, -0.2876821])  # log 1/2, log 3/4
    assert entropy is not None
    assert entropy.tolist() == pytest.approx([0.6931472, 0.5623351])
    values.sum().backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([0.5, -0.5, -0.25, 0.25])


def test_bfloat16_logits_give_float32_results() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 50, generator=generator).bfloat16().requires_grad_()
    tokens = torch.arange(5)
    values, *_ = token_logprobs(logits, tokens)
    expected = torch.log_softmax(logits.detach().float(), -1).gather(1, tokens[:, None]).squeeze(1)
    assert values.dtype == torch.float32
    assert torch.allclose(values, expected, atol=1e-6)
    values.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_huge_logits_and_no_rows() -> None:
    values, *_ = token_logprobs(torch.tensor([[1e4, -1e4]]), torch.tensor([1]))
    assert values.item() == -2e4
    values, entropy, _ = token_logprobs(
        torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), entropy=True
    )
    assert values.shape == (0,)
    assert entropy is not None
    assert entropy.shape == (0,)


def test_the_same_with_and_without_gradient() -> None:
    logits = torch.randn(9, 11, generator=torch.Generator().manual_seed(3), requires_grad=True)
    tokens = torch.arange(9)
    with torch.no_grad():
        without, *_ = token_logprobs(logits, tokens)
    assert torch.equal(token_logprobs(logits, tokens)[0], without)
