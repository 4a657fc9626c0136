"""What training takes by default to be fast, on one device: compiled layers, FlashAttention 3.

The CPU twins see that a CPU takes neither; what a graph is made of, `test_compiled_layers.py` sees.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import create_engine
from engines.training.model.attention import Packing, packed_attention
from engines.types import TokenBatch
from hardware.base import PlatformBase
from hardware.detection import has_kernel_compiler

LENGTHS = ((40, 9), (300,), (64, 64, 64), (17, 230, 45, 8), (512, 2), (5, 1, 77, 130, 99))
LOSS, NORM = 2e-2, 5e-2
"""Tolerance of a loss (absolute) and of a gradient norm (relative) in bfloat16."""
ATTENTION = 2e-2
"""Largest difference of attention, as a share of the largest value."""


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    """Without the graphs of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batch_of(lengths: tuple[int, ...]) -> TokenBatch:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(4, 512, (n,), generator=generator).tolist() for n in lengths]
    return TokenBatch.from_sequences(ids, loss_mask=[[0.0] + [1.0] * (n - 1) for n in lengths])


def trained(platform: PlatformBase, model_dir: Path, training: TrainingConfig) -> Iterator[Any]:
    """Loss, gradient norm and number of graphs after a step on each row."""
    engine = create_engine(
        "language_model", model_dir, training, OptimizerConfig(lr=1e-4), 10, platform, seed=0
    )
    engine.initialize()
    for lengths in LENGTHS:
        update = engine.train_batch(batch_of(lengths), SupervisedLoss())
        engine.infer_batch(batch_of(lengths))
        yield update.loss, update.grad_norm, counters["stats"]["unique_graphs"]


def test_layers_are_compiled_for_rows_of_any_length(
    platform: PlatformBase, model_dir: Path
) -> None:
    chosen = TrainingConfig(dtype="bfloat16", gradient_checkpointing=False).on(
        accelerator=platform.is_accelerator, has_compiler=has_kernel_compiler()
    )
    if platform.device_name == "cpu":
        assert chosen.use_torch_compile is False
        pytest.skip("a CPU compiles nothing by default; the CPU twin is test_compiled_layers.py")
    if not has_kernel_compiler():
        pytest.skip("needs Triton and a C compiler")
    assert chosen.use_torch_compile is True
    plain = chosen.model_copy(update={"use_torch_compile": False})
    expected = [*trained(platform, model_dir, plain)]
    before = counters["stats"]["unique_graphs"]
    found = [*trained(platform, model_dir, chosen)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=LOSS)
        assert ours[1] == pytest.approx(theirs[1], rel=NORM)
    graphs = [each[2] - before for each in found]
    assert graphs[0] > 0
    assert graphs[-1] == graphs[1], "no row adds a graph"
    assert graphs[-1] <= 4, "one with gradients and one without, of whole layers"


def attended(platform: PlatformBase) -> list[Tensor]:
    """Result and gradients of attention over packed rows, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 7, 64, 64, 129, 300)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inputs = [
        torch.randn(1, heads, sum(lengths), 64, generator=generator)
        .to(platform.device(), torch.bfloat16)
        .requires_grad_()
        for heads in (8, 2, 2)
    ]
    packing = Packing.from_cu_seqlens(bounds.to(platform.device()))
    query, key, value = inputs
    out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packing=packing)
    (out.float() ** 2).sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def test_flash_attention_3_agrees_with_torchs_own(platform: PlatformBase) -> None:
    with suppress(ImportError):
        from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
    expected, name = attended(platform), platform.choose_attention()
    if platform.device_name == "cpu":
        assert name == "torch's own kernels"
    elif name != "FlashAttention 3":
        pytest.skip(f"needs a Hopper GPU and the module flash_attn_interface: {name} is used")
    for ours, theirs in zip(attended(platform), expected, strict=True):
        largest = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ATTENTION * largest)
