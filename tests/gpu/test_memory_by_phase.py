"""What a rank holds on one device in each phase, and what it gives back between them.

The CPU half runs the same phases without the figures of a device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import LoraConfig, OptimizerConfig, TrainingConfig
from engines.training.backends.transformers import module_engine
from engines.training.base import BaseEngine, create_engine
from engines.types import TokenBatch
from hardware.base import PlatformBase

BATCH = TokenBatch.from_sequences(
    [list(range(4, 4 + 60 + 7 * i)) for i in range(8)],
    loss_mask=[[0] + [1] * (59 + 7 * i) for i in range(8)],
)
LR, NUM_STEPS = 1e-3, 3
MAX_RESERVED_OVER_ALLOCATED = 1.3
SLACK_BYTES = 24 << 20
"""What the allocator rounds up: a block of 20 MiB at most, and one of 2 MiB for small tensors."""


def new_engine(
    path: Path, platform: PlatformBase, *, trains: bool = True, **training: Any
) -> BaseEngine:
    config = TrainingConfig.model_validate({"collective_timeout_s": 60.0, **training})
    optimizer = OptimizerConfig(lr=LR) if trains else None
    engine = create_engine("language_model", path, config, optimizer, 9, platform, seed=0)
    engine.initialize()
    engine.leave_device()
    return engine


def weights(engine: BaseEngine) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in engine.get_per_tensor_param()}


def check_equal(a: dict[str, Tensor], b: dict[str, Tensor], platform: PlatformBase) -> None:
    """Bitwise on a CPU; on a GPU the backward pass of attention adds in no fixed order."""
    largest = max(float((a[name] - b[name]).abs().max()) for name in b)
    # One Adam step moves a weight by at most about the learning rate, whatever the gradient.
    assert largest <= (2 * NUM_STEPS * LR if platform.is_accelerator else 0)


def test_an_update_gives_its_memory_back_to_the_device(
    platform: PlatformBase, model_dir: Path
) -> None:
    engine = new_engine(model_dir, platform, dtype="bfloat16")
    engine.train_batch(BATCH, SupervisedLoss())
    if platform.device_name == "cpu":
        engine.leave_device()
        return
    free_bytes = torch.cuda.mem_get_info()[0]
    kept_bytes = torch.cuda.memory_reserved()
    engine.leave_device()
    reserved_bytes, allocated_bytes = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    assert reserved_bytes < kept_bytes
    assert torch.cuda.mem_get_info()[0] > free_bytes, "others see it"
    assert reserved_bytes <= MAX_RESERVED_OVER_ALLOCATED * allocated_bytes + SLACK_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_moments_change_no_number(
    platform: PlatformBase, model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(module_engine, "PART_BYTES", 1 << 18)
    found: dict[bool, dict[str, Tensor]] = {}
    at_rest: dict[bool, int] = {}
    for offload in (False, True):
        engine = new_engine(model_dir, platform, dtype=dtype, optimizer_offload=offload)
        for _ in range(NUM_STEPS):
            engine.train_batch(BATCH, SupervisedLoss())
        found[offload] = weights(engine)
        engine.leave_device()
        at_rest[offload] = platform.memory_allocated_bytes()
        moment_bytes = 8 * sum(tensor.numel() for tensor in found[offload].values())
        del engine
    check_equal(found[True], found[False], platform)
    if platform.device_name != "cpu":
        assert at_rest[False] - at_rest[True] > 0.9 * moment_bytes


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_frozen_weights_take_the_bytes_of_the_compute_dtype(
    platform: PlatformBase, model_dir: Path, lora: dict[str, int] | None
) -> None:
    adapter = None if lora is None else LoraConfig(**lora)
    engine: Any = new_engine(
        model_dir, platform, trains=lora is not None, dtype="bfloat16", lora=adapter
    )
    logprobs = engine.infer_batch(BATCH).logprobs_T
    assert torch.isfinite(logprobs).all()
    frozen = {p.dtype for p in engine.model.parameters() if not p.requires_grad}
    held_in = torch.bfloat16 if platform.is_accelerator else torch.float32
    assert frozen == {held_in}


def test_activations_go_and_return_beside_the_computation(
    platform: PlatformBase, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.training import activation_offload

    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1 << 10)
    found = []
    for offload in (False, True):
        engine = new_engine(
            model_dir, platform, dtype="bfloat16", gradient_checkpointing=False,
            activation_offload=offload,
        )  # fmt: skip
        for _ in range(NUM_STEPS):
            engine.train_batch(BATCH, SupervisedLoss())
        found.append(weights(engine))
    check_equal(found[0], found[1], platform)
