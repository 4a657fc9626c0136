"""Log-probabilities from hidden states by the compiled tiles of a GPU, against all logits.

The reference computes from the same bfloat16 numbers in float64. The CPU half runs the same cases
without compilation; `tests/unit/engines/training/model/test_tile_math.py` compiles there.
"""

import pytest
import torch
from torch import Tensor

from engines.training.model import linear_tiles
from engines.training.model.linear_logprobs import (
    linear_logprobs_of,
    linear_token_logprobs,
    linear_topk_logprobs,
)
from engines.training.model.linear_tiles import tile_elements
from hardware.base import PlatformBase

N, D, V = 700, 64, 5_003
TILES = {"one tile": 1 << 26, "several": 1 << 19, "thin": 3 * V}
LOGIT_ERROR = 2.0**-8
"""Of a logit as the head rounds it, relative."""


def draw(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=generator).to(torch.bfloat16)
    weight = (torch.randn(V, D, generator=generator) * 0.3).to(torch.bfloat16)
    tokens = torch.randint(0, V, (N,), generator=generator)
    return (
        hidden.to(device).requires_grad_(),
        weight.to(device).requires_grad_(),
        tokens.to(device),
    )


def reference(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """(N, V) float64 log-probabilities of the rounded logits, with gradient to the inputs."""
    exact = hidden.double() @ weight.double().T
    rounded = exact + (exact.detach().to(torch.bfloat16).double() - exact.detach())
    return (rounded / temperature).log_softmax(dim=1)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("chunk_elements", TILES.values(), ids=TILES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(
    platform: PlatformBase, temperature: float, entropy: bool, chunk_elements: int
) -> None:
    hidden, weight, tokens = draw(platform.device())
    if platform.device_name != "cpu":
        assert linear_tiles.is_fused(hidden), "needs Triton and a C compiler"
    found = linear_token_logprobs(
        hidden, weight, tokens, temperature=temperature, entropy=entropy, sum_pi_squared=True,
        chunk_elements=chunk_elements,
    )  # fmt: skip
    all_logprobs = reference(hidden, weight, temperature)
    probs = all_logprobs.exp()
    wanted = all_logprobs.gather(1, tokens[:, None]).squeeze(1)
    wanted_entropy = -(probs * all_logprobs).sum(dim=1)
    error = LOGIT_ERROR / temperature
    assert float((found.logprobs_N.double() - wanted).detach().abs().max()) < 20 * error
    assert found.sum_pi_squared_N is not None
    assert relative(found.sum_pi_squared_N, probs.square().sum(dim=1)) < error
    slopes = torch.randn(2, N, generator=torch.Generator().manual_seed(4)).to(hidden.device)
    loss, wanted_loss = (found.logprobs_N * slopes[0]).sum(), (wanted * slopes[0]).sum()
    if found.entropy_N is not None:
        assert relative(found.entropy_N, wanted_entropy) < error
        loss = loss + (found.entropy_N * slopes[1]).sum()
        wanted_loss = wanted_loss + (wanted_entropy * slopes[1]).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected = torch.autograd.grad(wanted_loss, (hidden, weight))
    for grad, wanted_grad in zip(grads, expected, strict=True):
        assert grad.dtype == torch.bfloat16
        assert relative(grad, wanted_grad) < 2 * LOGIT_ERROR


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_student_that_is_its_teacher_has_its_numbers(
    platform: PlatformBase, temperature: float
) -> None:
    hidden, weight, _ = draw(platform.device())
    share = {"temperature": temperature, "chunk_elements": 1 << 19}
    top = linear_topk_logprobs(hidden, weight, 8, **share)
    own = linear_logprobs_of(hidden, weight, top.ids_NK, **share)
    assert torch.equal(own, top.logprobs_NK)
    first = linear_token_logprobs(hidden, weight, top.ids_NK[:, 0], **share)
    assert torch.equal(first.logprobs_N, top.logprobs_NK[:, 0])
    all_logprobs = reference(hidden, weight, temperature)
    wanted = all_logprobs.gather(1, top.ids_NK)
    assert float((own.double() - wanted).detach().abs().max()) < 20 * LOGIT_ERROR / temperature
    slopes = torch.randn(own.shape, generator=torch.Generator().manual_seed(4)).to(hidden.device)
    grads = torch.autograd.grad((own * slopes).sum(), (hidden, weight))
    expected = torch.autograd.grad((wanted * slopes).sum(), (hidden, weight))
    for grad, wanted_grad in zip(grads, expected, strict=True):
        assert relative(grad, wanted_grad) < 2 * LOGIT_ERROR


@pytest.mark.gpu
def test_a_step_of_the_head_holds_a_few_tiles() -> None:
    """Peak memory for 8,192 positions over 150,000 tokens: all logits would be 2.5 GB."""
    if not torch.cuda.is_available():
        pytest.skip("needs one NVIDIA GPU and a torch built for CUDA")
    device = torch.device("cuda")
    hidden = torch.randn(8_192, 1_024, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(150_000, 1_024, device=device, dtype=torch.bfloat16).requires_grad_()
    tokens = torch.randint(0, 150_000, (8_192,), device=device)
    peaks = {}
    for turn in ("compiles", "counts"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_token_logprobs(
            hidden, weight, tokens, chunk_elements=tile_elements(hidden, chunked=True)
        ).logprobs_N.sum().backward()
        peaks[turn] = torch.cuda.max_memory_allocated() - before
        hidden.grad = weight.grad = None
    # The weights' gradient, float32 sums of a tile's width and of the hidden states, two tiles.
    assert peaks["counts"] < 307e6 + 134e6 + 34e6 + 2 * 134e6 + 100e6
