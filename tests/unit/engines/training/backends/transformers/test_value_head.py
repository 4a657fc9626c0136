"""Values keep their last digits where the model computes in bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.collectives import close_process_group
from engines.config.training import TrainingConfig
from engines.training.base import create_engine
from engines.training.model.logprobs import compute_in_float32, float32_linear
from engines.types import Readouts, TokenBatch
from hardware.cpu import CPUPlatform


def test_values_that_are_close_stay_apart() -> None:
    """bfloat16 has 8 significant bits: between 8 and 16 its numbers are 1/16 apart."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 64, generator=generator).bfloat16()
    head = nn.Linear(64, 1)
    with torch.no_grad():
        head.weight.copy_(0.05 * torch.randn(1, 64, generator=generator))
        head.bias.fill_(9.0)
    head = head.bfloat16()
    coarse = head(hidden).unique().numel()
    compute_in_float32(head)
    fine = head(hidden)
    assert fine.dtype == torch.float32
    assert fine.unique().numel() >= 99 > 2 * coarse
    exact = hidden.double() @ head.weight.double().T + head.bias.double()
    torch.testing.assert_close(fine.double(), exact, rtol=1e-6, atol=1e-6)


def test_gradients_have_the_dtype_of_the_parameters() -> None:
    head = nn.Linear(8, 1).bfloat16()
    compute_in_float32(head)
    hidden = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        head(hidden).sum().backward()
    assert head.weight.grad is not None
    assert (head.weight.grad.dtype, hidden.grad.dtype) == (torch.bfloat16,) * 2
    assert head.weight.grad.tolist() == [[3.0] * 8]


@pytest.fixture
def _alone() -> Iterator[None]:
    yield
    close_process_group()


@pytest.mark.usefixtures("_alone")
def test_an_engine_in_bfloat16_has_fine_values(qwen3_dir: Path) -> None:
    training = TrainingConfig(dtype="bfloat16")
    engine = create_engine("value_model", qwen3_dir, training, None, 1, CPUPlatform(), 0)
    engine.initialize()
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if name.startswith("score."):
                full = getattr(parameter, "to_local", lambda p=parameter: p)()
                full.fill_(9.0) if name.endswith("bias") else full.normal_(std=0.02)
    ids = torch.randint(3, 30, (10, 40), generator=torch.Generator().manual_seed(0)).tolist()
    found = engine.infer_batch(TokenBatch.from_sequences(ids), Readouts(last_values=True))
    assert found.values_T is not None
    assert found.last_values_B is not None
    near = found.values_T[found.values_T > 8]
    assert near.numel() == 390
    assert near.unique().numel() > 300
    assert ((found.last_values_B * 16) % 1 != 0).any()


def test_float32_is_as_before() -> None:
    hidden, head = torch.randn(5, 8), nn.Linear(8, 1)
    assert torch.equal(float32_linear(hidden, head.weight, head.bias), head(hidden))
