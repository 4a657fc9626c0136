"""Frozen weights on an accelerator: half the bytes, and the bits of every result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.apart_device import ApartPlatform
from torch import Tensor

from engines.config.training import LoraConfig, OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.fsdp.fsdp1 import FSDPEngine
from engines.training.spec import EngineSpec, ModelType
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.base import PlatformBase
from hardware.cpu import CPUPlatform

BATCH = TokenBatch.from_sequences([[3, 4, 5, 6, 7], [8, 9]], loss_mask=[[0, 0, 1, 1, 1], [0, 1]])
LORA = LoraConfig(rank=4)


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def engine_on(
    platform: PlatformBase, path: Path, kind: Any = FSDP2Engine, *, trains: bool = False,
    model_type: ModelType = "language_model", dtype: Any = "bfloat16", **training: Any,
) -> Any:  # fmt: skip
    if isinstance(platform, ApartPlatform):
        platform.is_apart = False
    config = TrainingConfig(dtype=dtype, **training)
    optimizer = OptimizerConfig(lr=1e-2) if trains else None
    engine = kind(EngineSpec(path, config, optimizer, 10, platform, 0, 1.0, model_type))
    engine.initialize()
    return engine


def both(path: Path, kind: Any = FSDP2Engine, **options: Any) -> tuple[Any, Any]:
    return (
        engine_on(ApartPlatform(), path, kind, **options),
        engine_on(CPUPlatform(), path, kind, **options),
    )


def dtypes(engine: Any) -> set[tuple[bool, torch.dtype]]:
    return {(p.requires_grad, p.dtype) for p in engine.model.parameters()}


def merged(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.float().clone() for name, tensor in engine.get_per_tensor_param()}


@pytest.mark.parametrize("kind", [FSDP2Engine, FSDPEngine])
@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_a_frozen_model_is_held_as_it_computes(
    qwen3_dir: Path, kind: Any, model_type: ModelType
) -> None:
    found, expected = both(qwen3_dir, kind, model_type=model_type)
    assert dtypes(found) == {(False, torch.bfloat16)}
    assert dtypes(expected) == {(False, torch.float32)}, "a CPU's curves stay"
    a, b = found.infer_batch(BATCH), expected.infer_batch(BATCH)
    assert torch.equal(a.logprobs_T, b.logprobs_T)
    assert (a.values_T is None) is (model_type == "language_model")
    assert a.values_T is None or torch.equal(a.values_T, b.values_T)
    rotary = [b for name, b in found.model.named_buffers() if "inv_freq" in name]
    assert rotary
    assert {buffer.dtype for buffer in rotary} == {torch.float32}


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_trains_over_a_base_of_half_the_bytes(
    qwen3_dir: Path, tmp_path: Path, use_dora: bool
) -> None:
    lora = LORA.model_copy(update={"use_dora": use_dora})
    found, expected = both(qwen3_dir, trains=True, lora=lora)
    assert dtypes(found) == {(False, torch.bfloat16), (True, torch.float32)}
    for engine in (found, expected):
        for _ in range(2):
            engine.train_batch(BATCH, sft)
    if not use_dora:  # its first magnitudes are norms of the weights, which were rounded
        states = [dict(engine.get_adapter_param()) for engine in (found, expected)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
        logprobs = [engine.infer_batch(BATCH).logprobs_T for engine in (found, expected)]
        assert torch.equal(*logprobs)
    a, b = merged(found), merged(expected)
    assert use_dora or all(torch.allclose(a[n], b[n], rtol=2**-8, atol=1e-3) for n in b)
    found.save_checkpoint(tmp_path, 2)
    # Each form of the base reads the other's.
    expected.load_checkpoint(tmp_path)
    assert all(torch.equal(merged(expected)[name], a[name]) for name in a)
    folded = engine_on(ApartPlatform(), qwen3_dir)
    folded.load_checkpoint(tmp_path, optimizer=False)
    assert all(torch.equal(merged(folded)[name], a[name].bfloat16().float()) for name in a)


def test_what_trains_keeps_float32_masters(qwen3_dir: Path) -> None:
    frozen = ("model.embed_tokens.*",)
    found = engine_on(ApartPlatform(), qwen3_dir, trains=True, frozen_parameters=frozen)
    assert dtypes(found) == {(True, torch.float32), (False, torch.float32)}
    flat = engine_on(ApartPlatform(), qwen3_dir, FSDPEngine, trains=True, lora=LORA)
    assert {dtype for _, dtype in dtypes(flat)} == {torch.float32}
    assert flat.train_batch(BATCH, sft).grad_norm > 0
    exact = engine_on(ApartPlatform(), qwen3_dir, dtype="float32")
    assert dtypes(exact) == {(False, torch.float32)}
