"""The fused kernel of the GPU build against the formula; needs a CUDA device."""

import pytest
import torch

from engines.training.model.attention import Packing, _batched_runs, _varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [3, 9, 14, 9, 1, 20]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_equals_batched_runs(dtype: torch.dtype, kv_heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    packing = Packing.from_cu_seqlens(bounds.cuda())
    rows = [
        torch.randn(sum(LENGTHS), heads, 64, generator=generator).cuda().to(dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    exact = [row.detach().float().requires_grad_() for row in rows]
    ours = _varlen(rows, packing, None, window)
    expected = _batched_runs(exact, packing, None, window)
    assert torch.allclose(ours.float(), expected, atol=2e-2)
    weights = torch.randn(expected.shape, generator=generator).cuda()
    grads = torch.autograd.grad((ours.float() * weights).sum(), rows)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for grad, want in zip(grads, wanted, strict=True):
        assert torch.allclose(grad.float(), want, atol=5e-2)
