"""The element-wise work on tiles as a compiler sees it: the same numbers as operator by operator.

The compiler here is torch's tracing without code generation: what a function writes in place, and
the branch that only compiled code takes, are what can differ. Generated code: tests/gpu/test_head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend

from engines.training.model import linear_tiles
from engines.training.model.linear_logprobs import (
    linear_logprobs_of,
    linear_token_logprobs,
    linear_topk_logprobs,
)

N, D, V = 9, 6, 23


@dataclass
class Compiled:
    """What was compiled: names of forms, and of the form of each graph that was made."""

    forms: list[str] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    torch.compiler.reset()
    found, torch_compile = Compiled(), torch.compile

    def traced(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        found.forms.append(function.__name__)

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            found.graphs.append(function.__name__)
            return lookup_backend("aot_eager")(graph, inputs)

        return torch_compile(function, dynamic=dynamic, backend=backend, fullgraph=True)

    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(linear_tiles, "is_fused", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(linear_tiles, "_MIN_ROWS", 4)
    linear_tiles._fused.cache_clear()
    yield found
    linear_tiles._fused.cache_clear()
    torch.compiler.reset()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(V, D, generator=generator).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(0, V, (N, 3), generator=generator)


def results(temperature: float, entropy: bool) -> list[Tensor]:
    """Of one token with all readouts, of three, of the likeliest; and the gradients."""
    hidden, weight, tokens = inputs()
    share: dict[str, Any] = {"temperature": temperature, "chunk_elements": 30}
    one = linear_token_logprobs(
        hidden, weight, tokens[:, 0], entropy=entropy, sum_pi_squared=True, **share
    )
    several = linear_logprobs_of(hidden, weight, tokens, **share)
    slopes = torch.linspace(-1.0, 2.0, N)
    loss = (one.logprobs_N * slopes).sum() + (several * slopes[:, None]).square().sum()
    if one.entropy_N is not None:
        loss = loss + (one.entropy_N * slopes.flip(0)).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    top = linear_topk_logprobs(hidden, weight, 4, **share)
    return [x.detach() for x in (*one, several, *grads, *top) if x is not None]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_compiled_tiles_give_the_numbers_of_plain_ones(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, temperature: float, entropy: bool
) -> None:
    found = results(temperature, entropy)
    # Rows end in tiles of one, and columns in narrower ones.
    assert {name.rstrip("01") for name in compiled.forms} == {
        "_add_columns_", "_gradient_of_logits_"
    }  # fmt: skip
    assert compiled.graphs == compiled.forms, "a form was compiled anew for another size"
    num_compiled = len(compiled.forms)
    monkeypatch.setattr(linear_tiles, "is_fused", lambda x: False)
    plain = results(temperature, entropy)
    assert len(compiled.forms) == num_compiled
    for ours, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("fused", "elements", "shape"),
    [(False, 1 << 24, (512, 1 << 15)), (True, 1 << 26, (2048, 1 << 15))],
)
def test_tiles_where_nothing_is_held_in_float32_have_more_rows(
    monkeypatch: pytest.MonkeyPatch, fused: bool, elements: int, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(linear_tiles, "is_fused", lambda x: fused)
    hidden = torch.empty(16_384, 1_024, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(151_936, 1_024, dtype=torch.bfloat16, device="meta")
    assert linear_tiles.tile_elements(hidden, chunked=True) == elements
    assert linear_tiles.tile_shape(hidden, weight, elements) == shape
    whole = linear_tiles.tile_elements(hidden, chunked=False)
    assert linear_tiles.tile_shape(hidden, weight, whole) == (16_384, 151_936)


def test_without_a_gpu_nothing_is_compiled() -> None:
    assert not linear_tiles.is_fused(torch.empty(2, 2, dtype=torch.bfloat16))
