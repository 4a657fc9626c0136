"""Offloaded optimizer state: where it is, what is copied, and that no number changes."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.apart_device import ApartPlatform
from torch import Tensor

from engines.config.training import EmaConfig, OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.fsdp.fsdp1 import FSDPEngine
from engines.training.backends.transformers import module_engine
from engines.training.host_state import HostState
from engines.training.spec import EngineSpec
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.base import PlatformBase
from hardware.cpu import CPUPlatform

BATCH = TokenBatch.from_sequences([[3, 4, 5, 6, 7], [8, 9]], loss_mask=[[0, 0, 1, 1, 1], [0, 1]])


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def started(
    path: Path, platform: PlatformBase, kind: Any = FSDP2Engine, *, ema: bool = False,
    **training: Any,
) -> Any:  # fmt: skip
    optimizer = OptimizerConfig(lr=1e-2, ema=EmaConfig(decay=0.5) if ema else None)
    config = TrainingConfig(optimizer_offload=True, **training)
    engine = kind(EngineSpec(path, config, optimizer, 10, platform, 0))
    if isinstance(platform, ApartPlatform):
        platform.is_apart = False
    engine.initialize()
    if isinstance(platform, ApartPlatform):
        platform.is_apart = True
    engine.leave_device()
    return engine


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}


def moments(engine: Any) -> list[Tensor]:
    local = [getattr(t, "_local_tensor", t) for t in engine._moments_of(engine._optimizer.state)]
    return [tensor for tensor in local if tensor.numel()]


@pytest.mark.parametrize("kind", [FSDP2Engine, FSDPEngine])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ema", [False, True])
def test_offloading_moves_each_moment_twice_a_step(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, dtype: str,
    ema: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(module_engine, "PART_BYTES", 8_000)
    platform = ApartPlatform()
    engine = started(qwen3_dir, platform, kind, dtype=dtype, ema=ema)
    expected = started(qwen3_dir, CPUPlatform(), kind, dtype=dtype, ema=ema)
    at_rest = [tensor.data_ptr() for tensor in moments(engine)]
    num_bytes = sum(tensor.nbytes for tensor in moments(engine))
    for _ in range(2):
        platform.traffic.clear()
        engine.train_batch(BATCH, sft)
        expected.train_batch(BATCH, sft)
        assert [sum(each) for each in platform.traffic.copies[:2]] == [num_bytes, num_bytes]
        assert [tensor.data_ptr() for tensor in moments(engine)] == at_rest, "host memory is kept"
    platform.traffic.clear()
    engine.infer_batch(BATCH)
    assert not any(platform.traffic.copies), "inference needs no moments"
    engine.save_checkpoint(tmp_path, 2)
    for each in (engine, expected):
        each.load_checkpoint(tmp_path)
        each.leave_device()
        each.train_batch(BATCH, sft)
        assert each.adopt_average() is ema
    found, wanted = weights(engine), weights(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(map(torch.equal, moments(engine), moments(expected)))


def test_a_part_arrives_while_another_is_stepped(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_engine, "PART_BYTES", 1)  # a part for each parameter
    platform = ApartPlatform()
    engine = started(qwen3_dir, platform)
    hosts = {tensor.data_ptr() for tensor in moments(engine)}
    away: list[int] = []
    step = engine._optimizer.step

    def spy() -> None:
        away.append(sum(tensor.data_ptr() not in hosts for tensor in moments(engine)))
        platform.traffic.calls.append("step")
        step()

    monkeypatch.setattr(engine._optimizer, "step", spy)
    platform.traffic.clear()
    engine.train_batch(BATCH, sft)
    num_parameters = len(engine._optimizer.state)
    assert away == [4] * (num_parameters - 1) + [2], "two moments each: one is used, one arrives"
    calls = platform.traffic.calls
    assert calls[:6] == ["copy 0", "copy 0", "join 0", "copy 0", "copy 0", "step"]
    assert calls[6:9] == ["copy 1", "copy 1", "join 0"]
    assert calls[-1] == "synchronize 1", "the host reads the moments next"
    assert [len(group["params"]) for group in engine._optimizer.param_groups] != [1, 0]


def test_moments_are_on_the_device_for_the_step_alone(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = ApartPlatform()
    engine = started(qwen3_dir, platform)
    seen: list[bool] = []

    def loss(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        seen.append(any(platform.traffic.copies[0]))
        return sft(outputs, batch, counts)

    platform.traffic.clear()
    engine.train_batch(BATCH, loss)
    assert seen == [False]
    assert any(platform.traffic.copies[0])


def test_a_step_that_fails_leaves_whole_groups(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_engine, "PART_BYTES", 1)
    engine = started(qwen3_dir, ApartPlatform())
    before = [len(group["params"]) for group in engine._optimizer.param_groups]
    step = engine._optimizer.step

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._optimizer, "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.train_batch(BATCH, sft)
    assert [len(group["params"]) for group in engine._optimizer.param_groups] == before
    monkeypatch.setattr(engine._optimizer, "step", step)
    assert engine.train_batch(BATCH, sft).grad_norm > 0


def test_host_memory_goes_with_its_tensor() -> None:
    platform = ApartPlatform()
    state = HostState.of(platform)
    assert state is not None
    tensor = torch.arange(4.0)
    state.move([tensor], "cpu")
    assert len(state._hosts) == 1
    state.move([tensor], platform.device())
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    del tensor
    gc.collect()
    assert len(state._hosts) == 0
    assert HostState.of(CPUPlatform()) is None
