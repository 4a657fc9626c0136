"""Chunked log-probabilities against full logits: values, gradients, dtypes, and memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from rlhf.testing.saved_tensors import saved_tensors
from torch import Tensor
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from engines.training.model import linear_tiles
from engines.training.model.linear_logprobs import linear_token_logprobs
from engines.training.model.logprobs import token_logprobs

N, D, V = 11, 5, 19
TILES = {"one tile": 1 << 20, "whole rows": 4 * V, "parts of rows": 30, "single logits": 1}


@pytest.fixture(autouse=True)
def _thin_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows below which a tile takes part of the vocabulary: few, so that small cases do."""
    monkeypatch.setattr(linear_tiles, "_MIN_ROWS", 4)


def draw(
    dtype: torch.dtype, *, bias: bool = True, rows: int = N
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(V, generator=generator, dtype=torch.float64) if bias else None
    tokens = torch.randint(0, V, (rows,), generator=generator)
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in (hidden, weight, bias_V)]
    assert leaves[0] is not None
    assert leaves[1] is not None
    return leaves[0], leaves[1], tokens, leaves[2]


def reference(
    hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """By definition, from all logits in float64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits / temperature
    chosen = torch.log_softmax(logits, dim=1).gather(1, tokens[:, None]).squeeze(1)
    return chosen, Categorical(logits=logits).entropy()


def objective(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """Weighs every row differently, and both results."""
    weights = torch.randn(2, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    total = (logprobs.double() * weights[0]).sum()
    return total if entropy is None else total + (entropy.double() * weights[1]).sum()


@pytest.mark.parametrize("chunk_elements", TILES.values(), ids=TILES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("temperature", "bias"), [(1.0, False), (0.6, True)])
def test_values_and_gradients_in_float64(
    chunk_elements: int, temperature: float, bias: bool, entropy: bool
) -> None:
    hidden, weight, tokens, bias_V = draw(torch.float64, bias=bias)
    got, got_entropy, got_squares = linear_token_logprobs(
        hidden, weight, tokens, bias_V=bias_V, temperature=temperature, entropy=entropy,
        sum_pi_squared=True, chunk_elements=chunk_elements,
    )  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias_V) / temperature
    assert got_squares is not None
    assert not got_squares.requires_grad
    wanted_squares = logits.detach().softmax(dim=1).square().sum(dim=1)
    torch.testing.assert_close(got_squares, wanted_squares, rtol=0, atol=1e-12)
    wanted, wanted_entropy = reference(hidden, weight, tokens, bias_V, temperature)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert (got_entropy is not None) == entropy
    if got_entropy is not None:
        torch.testing.assert_close(got_entropy, wanted_entropy, rtol=0, atol=1e-12)
    leaves = [x for x in (hidden, weight, bias_V) if x is not None]
    grads = torch.autograd.grad(objective(got, got_entropy), leaves)
    expected = torch.autograd.grad(objective(wanted, wanted_entropy if entropy else None), leaves)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-11)


def test_gradcheck() -> None:
    hidden, weight, tokens, bias = draw(torch.float64, rows=5)

    assert bias is not None

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, got_entropy, _ = linear_token_logprobs(
            leaves[0], leaves[1], tokens, bias_V=leaves[2], temperature=0.7, entropy=True,
            chunk_elements=30,
        )  # fmt: skip
        assert got_entropy is not None
        return logprobs, got_entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_by_hand() -> None:
    # Logits (0, log 3): probabilities 1/4 and 3/4.
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [1.0986123]], requires_grad=True)
    logprobs, entropy, _ = linear_token_logprobs(
        hidden, weight, torch.tensor([0, 1]), entropy=True, chunk_elements=1
    )
    assert logprobs.tolist() == pytest.approx([-1.3862944, -0.2876821])
    assert entropy is not None
    assert entropy.tolist() == pytest.approx([0.5623351] * 2)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    # Rows (1 - 1/4, -3/4) and (-1/4, 1 - 3/4).
    assert weight.grad.flatten().tolist() == pytest.approx([0.5, -0.5])
    assert hidden.grad.flatten().tolist() == pytest.approx([-0.75 * 1.0986123, 0.25 * 1.0986123])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_exact_as_its_logits(dtype: torch.dtype) -> None:
    hidden, weight, tokens, bias = draw(dtype)
    got, entropy, _ = linear_token_logprobs(
        hidden, weight, tokens, bias_V=bias, entropy=True, chunk_elements=30
    )
    wanted, wanted_entropy = reference(hidden, weight, tokens, bias, 1.0)
    assert got.dtype == torch.float32
    # A logit below 16 is rounded by at most half a step of the dtype at 8.
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2 * rounding)
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=0, atol=2 * rounding)
    leaves = [hidden, weight, *([] if bias is None else [bias])]
    grads = torch.autograd.grad(objective(got, entropy), leaves)
    expected = torch.autograd.grad(objective(wanted, wanted_entropy), leaves)
    for leaf, grad, expected_grad in zip(leaves, grads, expected, strict=True):
        assert grad.dtype == leaf.dtype == dtype
        error = (grad - expected_grad).norm() / expected_grad.norm()
        assert error < 4 * torch.finfo(dtype).eps


def test_gradients_of_weights_are_summed_in_float32() -> None:
    # Each tile of 4 rows adds 2; a sum in bfloat16 stops growing at 512.
    num_rows = 2048
    hidden = torch.ones(num_rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    logprobs, *_ = linear_token_logprobs(hidden, weight, tokens, chunk_elements=8)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [num_rows / 2, -num_rows / 2]


@pytest.mark.parametrize("chunk_elements", TILES.values(), ids=TILES)
def test_tiles_do_not_change_results(chunk_elements: int) -> None:
    hidden, weight, tokens, bias = draw(torch.float32)
    results = []
    for size in (1 << 20, chunk_elements):
        got, entropy, _ = linear_token_logprobs(
            hidden, weight, tokens, bias_V=bias, entropy=True, chunk_elements=size
        )
        assert bias is not None
        grads = torch.autograd.grad(objective(got, entropy), (hidden, weight, bias))
        results.append(((got, entropy), grads))
    (values, grads), (other_values, other_grads) = results
    torch.testing.assert_close(values, other_values, rtol=1e-6, atol=1e-6)
    for grad, other in zip(grads, other_grads, strict=True):
        assert (grad - other).norm() <= 1e-6 * grad.norm()


def test_the_same_with_and_without_gradient() -> None:
    hidden, weight, tokens, _ = draw(torch.float32, bias=False)
    with torch.no_grad():
        without, *_ = linear_token_logprobs(hidden, weight, tokens, chunk_elements=30)
    with_gradient, *_ = linear_token_logprobs(hidden, weight, tokens, chunk_elements=30)
    assert torch.equal(with_gradient, without)
    assert with_gradient.requires_grad
    assert not without.requires_grad


def test_agrees_with_the_function_that_takes_logits() -> None:
    # Large logits: an entropy from the difference of two large numbers would be off by 1e-4.
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (50, 1000))
    tokens = torch.arange(50)
    ours, entropy, _ = linear_token_logprobs(hidden, weight, tokens, temperature=0.8, entropy=True)
    theirs, their_entropy, _ = token_logprobs(
        torch.nn.functional.linear(hidden, weight), tokens, temperature=0.8, entropy=True
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, their_entropy, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_is_trained_gets_a_gradient(frozen: str) -> None:
    hidden, weight, tokens, _ = draw(torch.float64, bias=False)
    trained = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    logprobs, *_ = linear_token_logprobs(hidden, weight, tokens, chunk_elements=30)
    objective(logprobs, None).backward()
    wanted, _ = reference(hidden, weight, tokens, None, 1.0)
    (expected,) = torch.autograd.grad(objective(wanted, None), trained)
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad, expected)
    assert (hidden if frozen == "hidden" else weight).grad is None


@pytest.mark.parametrize("cut", [7, V], ids=["uneven", "no rows"])
def test_a_vocabulary_cut_over_two_ranks(tmp_path: Path, cut: int) -> None:
    hidden, weight, tokens, _ = draw(torch.float64, bias=False)
    store = dist.FileStore(str(tmp_path / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]
    first = (0, cut)

    def rank(index: int) -> list[Tensor]:
        gloo = dist.ProcessGroupGloo(store, index, 2, timedelta(seconds=30))
        group = cast(dist.ProcessGroup, gloo)
        rows = slice(first[index], V if index else first[1])
        own_hidden = hidden.detach().clone().requires_grad_()
        own_weight = weight.detach()[rows].clone().requires_grad_()
        logprobs, entropy, squares = linear_token_logprobs(
            own_hidden, own_weight, tokens, temperature=0.7, entropy=True, sum_pi_squared=True,
            chunk_elements=30, group=group, first_token=first[index],
        )  # fmt: skip
        assert entropy is not None
        assert squares is not None
        probs = (hidden @ weight.T / 0.7).detach().softmax(dim=1)
        torch.testing.assert_close(squares, probs.square().sum(dim=1))
        grads = torch.autograd.grad(objective(logprobs, entropy), (own_hidden, own_weight))
        return [logprobs.detach(), entropy.detach(), *grads]

    with ThreadPoolExecutor(2) as ranks:
        left, right = ranks.map(rank, range(2))
    values = reference(hidden, weight, tokens, None, 0.7)
    grads = torch.autograd.grad(objective(*values), (hidden, weight))
    for index, value in enumerate(values):
        torch.testing.assert_close(left[index], value.detach())
        assert torch.equal(left[index], right[index])
    torch.testing.assert_close(left[2] + right[2], grads[0])
    torch.testing.assert_close(torch.cat([left[3], right[3]]), grads[1])


def test_huge_logits_and_no_rows() -> None:
    hidden, weight = torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0], [0.0]])
    for chunk_elements in (1, 100):
        logprobs, entropy, _ = linear_token_logprobs(
            hidden, weight, torch.tensor([1]), entropy=True, chunk_elements=chunk_elements
        )
        assert logprobs.item() == -2e4
        assert entropy is not None
        assert entropy.item() == 0.0
    hidden, weight, tokens, _ = draw(torch.float32, bias=False, rows=0)
    logprobs, entropy, _ = linear_token_logprobs(hidden, weight, tokens, entropy=True)
    assert logprobs.shape == (0,)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_what_is_refused() -> None:
    hidden, weight, tokens, _ = draw(torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        linear_token_logprobs(hidden, weight.bfloat16(), tokens)
    with pytest.raises(ValueError, match="chunk_elements: got 0"):
        linear_token_logprobs(hidden, weight, tokens, chunk_elements=0)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                self.num_elements = max(self.num_elements, x.numel())
        return made


def footprint(
    logprobs_of: Callable[[Tensor, Tensor, Tensor], Tensor], num_rows: int, vocabulary: int
) -> tuple[int, int]:
    """Bytes kept for the backward pass, and elements of the largest tensor made on the way."""
    hidden = torch.randn(num_rows, 4).requires_grad_()
    weight = torch.randn(vocabulary, 4).requires_grad_()
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    with LargestTensor() as largest:
        with saved_tensors(but=(hidden, weight)) as kept:
            loss = logprobs_of(hidden, weight, tokens).sum()
        loss.backward()
    return kept.num_bytes, largest.num_elements


def from_all_logits(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return token_logprobs(torch.nn.functional.linear(hidden, weight), tokens)[0]


def in_tiles(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logprobs, entropy, _ = linear_token_logprobs(
        hidden, weight, tokens, entropy=True, chunk_elements=512
    )
    assert entropy is not None
    return logprobs + entropy


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    for num_rows, vocabulary in ((64, 256), (256, 256), (64, 2048)):
        kept_bytes, largest = footprint(in_tiles, num_rows, vocabulary)
        # Token ids (8 bytes a row), log-sum-exp and entropy (4 each): nothing of the vocabulary.
        assert kept_bytes == 16 * num_rows
        assert largest <= max(512, 4 * vocabulary, 4 * num_rows)
        # The same gauge on the plain way, so that the figures above mean something.
        kept_bytes, largest = footprint(from_all_logits, num_rows, vocabulary)
        assert kept_bytes >= 4 * num_rows * vocabulary
        assert largest >= num_rows * vocabulary


def test_what_a_loss_does_not_read_gives_no_gradient() -> None:
    hidden, weight, tokens, bias = draw(torch.float64)
    logprobs, entropy, _ = linear_token_logprobs(
        hidden, weight, tokens, bias_V=bias, entropy=True, chunk_elements=30
    )
    assert entropy is not None
    wanted, wanted_entropy = reference(hidden, weight, tokens, bias, 1.0)
    assert bias is not None
    leaves = (hidden, weight, bias)
    for found, expected in ((logprobs, wanted), (entropy, wanted_entropy)):
        grads = torch.autograd.grad(found.double().sum(), leaves, retain_graph=True)
        others = torch.autograd.grad(expected.double().sum(), leaves, retain_graph=True)
        torch.testing.assert_close(grads, others, rtol=0, atol=1e-12)
