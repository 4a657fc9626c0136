"""Token log-probabilities against torch.distributions, and their gradients against numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import create_engine
from engines.training.model import logprobs
from engines.training.model.logprobs import token_logprobs
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch
from hardware.cpu import CPUPlatform


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


class NumOperations(TorchDispatchMode):
    """Counts operations."""

    num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_entropies_without_gradient_cost_no_backward_pass() -> None:
    """The backward pass is that of logprobs alone, operation by operation and bit by bit."""
    passes = []
    for asked in (Readouts(), Readouts(entropy=True, entropy_gradient=False)):
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(7, 11, generator=generator, requires_grad=True)
        found = token_logprobs(logits, torch.arange(7), entropy=asked.entropy).read_for(asked)
        loss = found.logprobs_N.square().sum()
        with NumOperations() as operations:
            loss.backward()
        assert logits.grad is not None
        passes.append((operations.num, logits.grad.tolist()))
    assert passes[0] == passes[1]


def test_a_loss_of_the_entropy_alone_has_its_gradient() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(6), requires_grad=True)
    _, entropy_N, _ = token_logprobs(logits, torch.arange(3), entropy=True)
    assert entropy_N is not None
    (grad,) = torch.autograd.grad(entropy_N.sum(), logits)
    wanted = torch.distributions.Categorical(logits=logits).entropy().sum()
    assert torch.allclose(grad, torch.autograd.grad(wanted, logits)[0], atol=1e-6)


def test_whole_logits_get_no_gradient_of_reported_entropies(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    backward = logprobs._TokenLogprobs.backward

    def spy(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        given.append(grad_outputs[1] is not None)
        return backward(ctx, *grad_outputs)

    monkeypatch.setattr(logprobs._TokenLogprobs, "backward", staticmethod(spy))

    class Loss:
        def __init__(self, asked: Readouts) -> None:
            self.readouts = asked

        def __call__(
            self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
        ) -> LossOutput:
            assert outputs.entropy_T is not None
            return LossOutput(outputs.logprobs_T.sum())

    training = TrainingConfig(chunked_logprobs=False)
    engine = create_engine(
        "language_model", make_model("qwen3"), training, OptimizerConfig(), 1, CPUPlatform(), 0
    )
    engine.initialize()
    batch = TokenBatch.from_sequences([[2, 3, 4]], loss_mask=[[0.0, 1.0, 1.0]])
    for gradient in (True, False):
        engine.train_batch(batch, Loss(Readouts(entropy=True, entropy_gradient=gradient)))
    assert given == [True, False]
