"""Packed attention, forward and backward, against the softmax written out for each sequence.

On a GPU in bfloat16 the code under test is torch's fused variable-length kernel, and the test
sees to it that it is; everywhere else it is SDPA per run of equal lengths. The reference
computes in float32 from the same rounded inputs.
"""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.training.model.attention import Packing, packed_attention
from hardware.base import PlatformBase
from infra.errors import ConfigError

LENGTHS = (1, 7, 64, 64, 129, 300)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""Largest error as a share of the largest value of that tensor; bfloat16 has 8 bits."""


def reference(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
    """(T, heads, head_dim) in, the same out; sequence by sequence, head by head group."""
    outputs, groups = [], q.shape[1] // k.shape[1]
    for rows in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        query, key, value = (x.transpose(0, 1) for x in rows)
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
        position = torch.arange(query.shape[1], device=q.device)
        distance = position[:, None] - position[None, :]
        hidden = (distance < 0) | (distance >= (window or query.shape[1]))
        scores = (query @ key.transpose(1, 2) * scaling).masked_fill(hidden, -math.inf)
        outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outputs)


def count_fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of torch's kernel; it goes on working."""
    from torch.nn.attention import varlen

    calls: list[int] = []
    kernel = varlen.varlen_attn

    @functools.wraps(kernel)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    return calls


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_and_backward_equal_the_softmax(
    platform: PlatformBase, monkeypatch: pytest.MonkeyPatch, dtype: str, num_kv_heads: int,
    factor: float, window: int | None,
) -> None:  # fmt: skip
    calls = count_fused_calls(monkeypatch)
    device, num_heads, head_dim = platform.device(), 8, 64
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(LENGTHS), heads, head_dim, generator=generator)
        .to(getattr(torch, dtype))
        .to(device)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]
    upstream = torch.randn(inputs[0].shape, generator=generator).to(inputs[0].dtype).to(device)
    scaling = factor / math.sqrt(head_dim)

    ours = [x.clone().requires_grad_() for x in inputs]
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in ours)
    try:
        out, _ = packed_attention(
            torch.nn.Identity(), query, key, value, None,
            packing=Packing.from_cu_seqlens(cu_seqlens), scaling=scaling, sliding_window=window,
        )  # fmt: skip
    except ConfigError as error:
        pytest.skip(f"needs a newer torch: {error}")
    out.squeeze(0).backward(upstream)
    plain = [x.float().requires_grad_() for x in inputs]
    expected = reference(plain[0], plain[1], plain[2], scaling, window)
    expected.backward(upstream.float())

    pairs = [
        (out.detach().squeeze(0), expected.detach()),
        *((x.grad, y.grad) for x, y in zip(ours, plain, strict=True)),
    ]
    for name, (got, wanted) in zip(("out", "dq", "dk", "dv"), pairs, strict=True):
        assert got is not None
        assert wanted is not None
        error = float((got.float() - wanted).abs().max() / wanted.abs().max())
        assert error < TOLERANCE[dtype], name
    fused = platform.device_name != "cpu" and dtype == "bfloat16"
    assert len(calls) == int(fused)


def test_float32_keeps_no_scores_of_a_long_sequence(platform: PlatformBase) -> None:
    length, num_heads, num_kv_heads, head_dim = 4096, 8, 2, 64
    if platform.device_name == "cpu":
        length = 64
    device = platform.device()
    q, k, v = (
        torch.randn(1, heads, length, head_dim, device=device, requires_grad=True)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    packing = Packing.from_cu_seqlens(torch.tensor([0, length], dtype=torch.int32, device=device))
    before_bytes = platform.memory_allocated_bytes()
    out, _ = packed_attention(torch.nn.Module(), q, k, v, None, packing=packing)
    out.sum().backward()
    assert k.grad is not None
    if platform.device_name != "cpu":
        grown_bytes = platform.max_memory_allocated_bytes() - before_bytes
        assert grown_bytes < num_heads * length * length * 4 / 4, "a quarter of the scores"
