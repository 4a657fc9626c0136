"""Chunked log-probabilities of K tokens against full logits: values, gradients, ties, memory."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rlhf.testing.saved_tensors import LargestStorage, saved_tensors
from torch import Tensor
from torch.nn.functional import linear

from engines.training.model import linear_tiles
from engines.training.model.linear_logprobs import (
    linear_logprobs_of,
    linear_token_logprobs,
    linear_topk_logprobs,
)

N, D, V = 11, 5, 19
BELOW = 12
"""Of a vocabulary whose last rows stand for no token."""
TILES = {"one tile": 1 << 20, "whole rows": 4 * V, "parts of rows": 30, "single logits": 1}
every_tile = pytest.mark.parametrize("chunk_elements", TILES.values(), ids=TILES)


@pytest.fixture(autouse=True)
def _thin_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows below which a tile takes part of the vocabulary: few, so that small cases do."""
    monkeypatch.setattr(linear_tiles, "_MIN_ROWS", 4)


def draw(dtype: torch.dtype, rows: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and bias, with gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((rows, D), (V, D), (V,))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    hidden, weight, bias = (leaf.to(dtype).requires_grad_() for leaf in leaves)
    return hidden, weight, bias


def whole_numbers() -> tuple[Tensor, Tensor]:
    """Whose logits are small whole numbers: exact in every dtype, and mostly shared by several."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randint(-1, 2, shape, generator=generator).double() for shape in ((N, 3), (V, 3))
    )
    return hidden, weight


def some_tokens(num: int) -> Tensor:
    """(N, num) in any order, some of them twice in a row."""
    return torch.randint(0, V, (N, num), generator=torch.Generator().manual_seed(5))


def all_tokens() -> Tensor:
    """(N, V) every token of the vocabulary, in another order in each row."""
    generator = torch.Generator().manual_seed(6)
    return torch.stack([torch.randperm(V, generator=generator) for _ in range(N)])


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> Tensor:
    """By definition, from all logits in float64."""
    bias = None if bias is None else bias.double()
    logits = linear(hidden.double(), weight.double(), bias) / temperature
    return torch.log_softmax(logits, dim=1).gather(1, tokens)


def objective(logprobs: Tensor) -> Tensor:
    """Weighs every number differently."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(logprobs.shape, generator=generator, dtype=torch.float64)
    return (logprobs.double() * weights).sum()


def ranked(logits_NV: Tensor, num_top: int, below: int = V) -> list[list[int]]:
    """By definition: Python's sort, by the logit downwards and then by the token upwards."""
    return [
        sorted(range(min(below, len(row))), key=lambda token: (-row[token], token))[:num_top]
        for row in logits_NV.tolist()
    ]


@every_tile
@pytest.mark.parametrize("tokens", [some_tokens(1), some_tokens(6), all_tokens()])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_in_float64(
    chunk_elements: int, temperature: float, tokens: Tensor
) -> None:
    leaves = draw(torch.float64)
    hidden, weight, bias = leaves
    got = linear_logprobs_of(
        hidden, weight, tokens, bias_V=bias, temperature=temperature,
        chunk_elements=chunk_elements,
    )  # fmt: skip
    wanted = reference(hidden, weight, bias, tokens, temperature)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(objective(got), leaves)
    expected = torch.autograd.grad(objective(wanted), leaves)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-11)


def test_gradients_are_those_of_finite_differences() -> None:
    tokens = some_tokens(4)[:5]

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_logprobs_of(
            hidden, weight, tokens, bias_V=bias, temperature=0.7, chunk_elements=30
        )

    assert torch.autograd.gradcheck(logprobs, draw(torch.float64, rows=5))


def test_by_hand() -> None:
    # Logits (0, log 3): probabilities 1/4 and 3/4.
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [1.0986123]], requires_grad=True)
    logprobs = linear_logprobs_of(hidden, weight, torch.tensor([[1, 0]]), chunk_elements=1)
    assert logprobs.tolist() == [pytest.approx([-0.2876821, -1.3862944])]
    # Slopes 2 and 1 on them: 1 - 3/4, 2 - 9/4.
    (logprobs * torch.tensor([2.0, 1.0])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([0.25, -0.25])
    top = linear_topk_logprobs(hidden, weight, 2, temperature=0.5)
    # Logits (0, log 9).
    assert top.ids_NK.tolist() == [[1, 0]]
    assert top.logprobs_NK.tolist() == [pytest.approx([-0.1053605, -2.3025851])]


@every_tile
def test_of_one_token_it_is_what_is_computed_for_one(chunk_elements: int) -> None:
    hidden, weight, bias = draw(torch.float32)
    tokens = some_tokens(1)
    many = linear_logprobs_of(hidden, weight, tokens, bias_V=bias, chunk_elements=chunk_elements)
    one, *_ = linear_token_logprobs(
        hidden, weight, tokens[:, 0], bias_V=bias, chunk_elements=chunk_elements
    )
    assert torch.equal(many[:, 0], one)
    grads = (torch.autograd.grad(x.sum(), (hidden, weight, bias)) for x in (many, one))
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_exact_as_its_logits(dtype: torch.dtype) -> None:
    leaves, tokens = draw(dtype), some_tokens(6)
    hidden, weight, bias = leaves
    got = linear_logprobs_of(hidden, weight, tokens, bias_V=bias, chunk_elements=30)
    wanted = reference(hidden, weight, bias, tokens, 1.0)
    assert got.dtype == torch.float32
    # A logit below 16 is rounded by at most half a step of the dtype at 8.
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=16 * torch.finfo(dtype).eps)
    grads = torch.autograd.grad(objective(got), leaves)
    expected = torch.autograd.grad(objective(wanted), leaves)
    for grad, expected_grad in zip(grads, expected, strict=True):
        assert grad.dtype == dtype
        error = (grad - expected_grad).norm() / expected_grad.norm()
        assert error < 4 * torch.finfo(dtype).eps


@every_tile
@pytest.mark.parametrize("num_top", [1, 5, V])
def test_the_most_likely_tokens(chunk_elements: int, num_top: int) -> None:
    hidden, weight, bias = draw(torch.float64)
    top = linear_topk_logprobs(
        hidden, weight, num_top, bias_V=bias, temperature=0.6, chunk_elements=chunk_elements
    )
    assert top.ids_NK.tolist() == ranked(linear(hidden, weight, bias), num_top)
    wanted = reference(hidden, weight, bias, top.ids_NK, 0.6)
    torch.testing.assert_close(top.logprobs_NK, wanted.detach(), rtol=0, atol=1e-12)
    assert not top.logprobs_NK.requires_grad


@every_tile
@pytest.mark.parametrize("below", [BELOW, V, V + 1])
def test_rows_beyond_the_tokens_are_not_taken_and_count(chunk_elements: int, below: int) -> None:
    hidden, weight, bias = draw(torch.float64)
    top = linear_topk_logprobs(
        hidden, weight, 5, bias_V=bias, chunk_elements=chunk_elements, below=below
    )
    assert top.ids_NK.tolist() == ranked(linear(hidden, weight, bias), 5, below)
    wanted = reference(hidden, weight, bias, top.ids_NK, 1.0)
    torch.testing.assert_close(top.logprobs_NK, wanted.detach(), rtol=0, atol=1e-12)


@every_tile
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_equally_likely_tokens_the_lowest_come_first(
    chunk_elements: int, dtype: torch.dtype
) -> None:
    hidden, weight = (x.to(dtype) for x in whole_numbers())
    logits = linear(hidden, weight)
    for num_top in (1, 4, 7, V):
        top = linear_topk_logprobs(hidden, weight, num_top, chunk_elements=chunk_elements)
        assert top.ids_NK.tolist() == ranked(logits, num_top)
    assert len(set(logits[0].tolist())) < V / 2
    top = linear_topk_logprobs(hidden, weight * 0, 5, chunk_elements=chunk_elements)
    assert top.ids_NK.tolist() == [[0, 1, 2, 3, 4]] * N


def test_a_few_large_logits_among_many_equal_ones() -> None:
    """Where torch's own top-k takes others than the first of equals."""
    weight = torch.zeros(500, 1)
    weight[torch.randperm(500, generator=torch.Generator().manual_seed(0))[:10]] = 1.0
    hidden = torch.ones(1, 1)
    top = linear_topk_logprobs(hidden, weight, 50)
    assert top.ids_NK.tolist() == ranked(hidden @ weight.T, 50, 500)


@every_tile
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_that_is_its_teacher_has_its_numbers(
    chunk_elements: int, dtype: torch.dtype
) -> None:
    hidden, weight, bias = draw(dtype)
    for num_top in (6, V):
        top = linear_topk_logprobs(
            hidden, weight, num_top, bias_V=bias, temperature=0.7, chunk_elements=chunk_elements
        )
        own = linear_logprobs_of(
            hidden, weight, top.ids_NK, bias_V=bias, temperature=0.7,
            chunk_elements=chunk_elements,
        )  # fmt: skip
        assert torch.equal(own, top.logprobs_NK)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_what_is_trained_gets_a_gradient(frozen: int) -> None:
    leaves, tokens = draw(torch.float64), some_tokens(4)
    leaves[frozen].requires_grad_(False)
    hidden, weight, bias = leaves
    got = linear_logprobs_of(hidden, weight, tokens, bias_V=bias, chunk_elements=30)
    objective(got).backward()
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    wanted = reference(hidden, weight, bias, tokens, 1.0)
    expected = torch.autograd.grad(objective(wanted), trained)
    torch.testing.assert_close([leaf.grad for leaf in trained], list(expected))
    assert leaves[frozen].grad is None


CUTS = {"uneven": 7, "two rows": 2, "no rows": V}
"""How many rows of the vocabulary the first of two ranks has."""
NUM_TOP = 4


def _rank(index: int, root: str) -> None:
    """One of two processes; writes what it finds for every cut."""
    linear_tiles._MIN_ROWS = 4  # pyright: ignore[reportPrivateUsage]
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=index, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    group = dist.new_group([0, 1])
    found: dict[str, Any] = {}
    for name, cut in CUTS.items():
        first, rows = (cut, slice(cut, V)) if index else (0, slice(0, cut))
        share = {"group": group, "first_token": first, "chunk_elements": 30, "temperature": 0.7}
        for tokens in (some_tokens(6), all_tokens()):
            hidden, weight, bias = draw(torch.float64)
            own = [x.detach()[part].clone().requires_grad_() for x, part in (
                (hidden, slice(None)), (weight, rows), (bias, rows))]  # fmt: skip
            got = linear_logprobs_of(own[0], own[1], tokens, bias_V=own[2], **share)
            grads = torch.autograd.grad(objective(got), own)
            found[f"{name} of {tokens.shape[1]}"] = [got.detach(), *grads]
        hidden, weight = whole_numbers()
        found[f"{name} top"] = list(linear_topk_logprobs(hidden, weight[rows], NUM_TOP, **share))
        top = linear_topk_logprobs(hidden, weight[rows], NUM_TOP, below=BELOW, **share)
        found[f"{name} top below"] = list(top)
        with pytest.raises(ValueError, match=f"most likely tokens: got {V + 1}; need 1 to {V}"):
            linear_topk_logprobs(hidden, weight[rows], V + 1, **share)
    torch.save(found, Path(root, f"rank{index}"))


def test_a_vocabulary_cut_over_two_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path))) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    left, right = (torch.load(tmp_path / f"rank{r}", weights_only=True) for r in range(2))
    for name in CUTS:
        for tokens in (some_tokens(6), all_tokens()):
            leaves = draw(torch.float64)
            wanted = reference(*leaves, tokens, 0.7)
            grads = torch.autograd.grad(objective(wanted), leaves)
            one, other = (part[f"{name} of {tokens.shape[1]}"] for part in (left, right))
            assert torch.equal(one[0], other[0])
            torch.testing.assert_close(one[0], wanted.detach())
            torch.testing.assert_close(one[1] + other[1], grads[0])
            torch.testing.assert_close(torch.cat([one[2], other[2]]), grads[1])
            torch.testing.assert_close(torch.cat([one[3], other[3]]), grads[2])
        hidden, weight = whole_numbers()
        for kind, below in (("top", V), ("top below", BELOW)):
            one, other = left[f"{name} {kind}"], right[f"{name} {kind}"]
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
            assert one[0].tolist() == ranked(hidden @ weight.T, NUM_TOP, below)
            torch.testing.assert_close(one[1], reference(hidden, weight, None, one[0], 0.7))


def test_huge_logits_and_no_rows() -> None:
    hidden, weight = torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0], [0.0]])
    for chunk_elements in (1, 100):
        top = linear_topk_logprobs(hidden, weight, 3, chunk_elements=chunk_elements)
        assert top.ids_NK.tolist() == [[0, 2, 1]]
        assert top.logprobs_NK.tolist() == [[0.0, -1e4, -2e4]]
    hidden, weight, _ = draw(torch.float32, rows=0)
    top = linear_topk_logprobs(hidden, weight, 3)
    assert top.ids_NK.shape == top.logprobs_NK.shape == (0, 3)
    linear_logprobs_of(hidden, weight, top.ids_NK).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_what_is_refused() -> None:
    hidden, weight, bias = draw(torch.float32)
    tokens = some_tokens(2)
    with pytest.raises(ValueError, match="bfloat16"):
        linear_logprobs_of(hidden, weight.bfloat16(), tokens)
    with pytest.raises(ValueError, match="bfloat16"):
        linear_topk_logprobs(hidden, weight, 2, bias_V=bias.bfloat16())
    with pytest.raises(ValueError, match="chunk_elements: got 0"):
        linear_logprobs_of(hidden, weight, tokens, chunk_elements=0)
    for num_top in (0, V + 1):
        with pytest.raises(ValueError, match=f"got {num_top}; need 1 to {V}"):
            linear_topk_logprobs(hidden, weight, num_top)
    with pytest.raises(ValueError, match=f"got {BELOW + 1}; need 1 to {BELOW}"):
        linear_topk_logprobs(hidden, weight, BELOW + 1, below=BELOW)


Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]
CHUNK, K = 512, 3


def from_all_logits(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(linear(hidden, weight), dim=1).gather(1, tokens)


def in_tiles(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return linear_logprobs_of(hidden, weight, tokens, chunk_elements=CHUNK)


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    def footprint(logprobs_of: Logprobs, num_rows: int, vocabulary: int) -> tuple[int, int]:
        """Bytes kept for the backward pass, and of the largest storage on the way."""
        hidden = torch.randn(num_rows, 4).requires_grad_()
        weight = torch.randn(vocabulary, 4).requires_grad_()
        tokens = torch.randint(0, vocabulary, (num_rows, K))
        with LargestStorage() as largest:
            with saved_tensors(but=(hidden, weight)) as kept:
                loss = logprobs_of(hidden, weight, tokens).sum()
            loss.backward()
        return kept.num_bytes, largest.num_bytes

    for num_rows, vocabulary in ((64, 256), (256, 256), (64, 2048)):
        kept_bytes, largest = footprint(in_tiles, num_rows, vocabulary)
        # Token ids (8 bytes each) and log-sum-exp (4 a row): nothing of the vocabulary.
        assert kept_bytes == (8 * K + 4) * num_rows
        inputs = max(4 * 4 * vocabulary, 4 * 4 * num_rows, 8 * K * num_rows)
        assert largest <= max(4 * CHUNK, inputs) < 4 * num_rows * vocabulary
        # The same gauge on the plain way, so that the figures above mean something.
        kept_bytes, largest = footprint(from_all_logits, num_rows, vocabulary)
        assert min(kept_bytes, largest) >= 4 * num_rows * vocabulary


def test_a_teacher_holds_no_logits_of_all_tokens() -> None:
    for num_rows, vocabulary in ((64, 256), (256, 256), (64, 2048)):
        hidden, weight = torch.randn(num_rows, 4), torch.randn(vocabulary, 4)
        with LargestStorage() as largest:
            linear_topk_logprobs(hidden, weight, K, chunk_elements=CHUNK)
        inputs = max(4 * 4 * vocabulary, 4 * 4 * num_rows, 8 * K * num_rows)
        assert largest.num_bytes <= max(4 * CHUNK, inputs) < 4 * num_rows * vocabulary
        with LargestStorage() as largest:
            torch.log_softmax(linear(hidden, weight), dim=1).topk(K)
        assert largest.num_bytes >= 4 * num_rows * vocabulary
