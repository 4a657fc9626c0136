"""Activations that wait on the host: what is copied, how often, and that no gradient changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rlhf.testing.apart_device import ApartPlatform
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training import activation_offload
from engines.training.activation_offload import ActivationOffload, unpack
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.spec import EngineSpec
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

SIZE = 256
NUM_BYTES = SIZE * SIZE * 4
BATCH = TokenBatch.from_sequences([[3, 4, 5, 6, 7], [8, 9]], loss_mask=[[0, 0, 1, 1, 1], [0, 1]])


def offload() -> tuple[ActivationOffload, ApartPlatform]:
    platform = ApartPlatform()
    made = ActivationOffload.of(platform)
    assert made is not None
    return made, platform


def gradients(weight: Tensor, x: Tensor) -> list[Tensor]:
    """Of a loss in which one activation is saved by several operations and through a view."""
    weight, x = weight.detach().requires_grad_(), x.detach().requires_grad_()
    hidden = torch.nn.functional.silu(x @ nn.Parameter(torch.eye(SIZE)))
    loss = (hidden @ weight).square().mean() + (
        hidden.view(-1) * hidden.t().reshape(-1)
    ).sin().sum()
    loss.backward()
    assert weight.grad is not None
    assert x.grad is not None
    return [weight.grad, x.grad]


def test_gradients_are_the_same_and_all_of_them_return() -> None:
    weight, x = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    plain = gradients(weight, x)
    made, platform = offload()
    with made.scope():
        moved = gradients(weight, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    inbound, outbound = platform.traffic.copies
    assert sum(inbound) == sum(outbound) > 0


def test_a_storage_is_copied_once_for_all_that_look_at_it() -> None:
    made, platform = offload()
    hidden = torch.randn(SIZE, SIZE)
    was = hidden.clone()
    with made.scope():
        packed = [made.pack(each) for each in (hidden, hidden.view(-1), hidden.t(), hidden[8:])]
        assert platform.traffic.copies[1] == [NUM_BYTES]
        hidden.add_(1.0)
        changed = made.pack(hidden)
        assert platform.traffic.copies[1] == [NUM_BYTES] * 2, "another version of its values"
    expected = [was, was.view(-1), was.t(), was[8:]]
    found = [unpack(each) for each in packed]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert platform.traffic.copies[0] == [NUM_BYTES], "and returns once"
    assert torch.equal(unpack(changed), hidden)


def test_memory_that_is_used_again_is_another_storage() -> None:
    made, platform = offload()
    with made.scope():
        packed = []
        for value in range(8):  # each takes the memory that the one before gave back
            packed.append(made.pack(torch.full((SIZE, SIZE), float(value))))
        assert platform.traffic.copies[1] == [NUM_BYTES] * 8
    assert [float(unpack(each)[0, 0]) for each in packed] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_storage_saved_before_is_on_its_way() -> None:
    made, platform = offload()
    with made.scope():
        packed = [made.pack(torch.randn(SIZE, SIZE)) for _ in range(3)]
    platform.traffic.clear()
    unpack(packed[2])
    # Its own copy, which the device waits for, then that of the second.
    assert platform.traffic.calls == ["join 1", "copy 0", "join 0", "join 1", "copy 0"]
    unpack(packed[1])
    assert platform.traffic.copies[0] == [NUM_BYTES] * 3
    unpack(packed[0])
    assert platform.traffic.copies[0] == [NUM_BYTES] * 3


def test_the_host_waits_when_too_much_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MAX_PENDING_BYTES", 2 * NUM_BYTES)
    made, platform = offload()
    with made.scope():
        for _ in range(7):
            made.pack(torch.randn(SIZE, SIZE))
    assert platform.traffic.calls.count("synchronize 1") == 2


def test_weights_and_small_tensors_stay() -> None:
    made, _ = offload()
    weight = nn.Parameter(torch.randn(SIZE, SIZE))
    small = torch.randn(8)
    assert made.pack(weight) is weight
    assert isinstance(made.pack(weight.t()), Tensor)
    assert made.pack(small) is small


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_tensor_that_is_cut_over_ranks_comes_back_as_one(
    placement: Replicate | Shard, tmp_path: Path
) -> None:
    made, platform = offload()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.randn(SIZE, SIZE)
        tensor = distribute_tensor(whole, mesh, [placement])
        packed = made.pack(tensor)
        assert packed is not tensor
        back = unpack(packed)
        assert isinstance(back, DTensor)
        assert back.placements == tensor.placements
        assert back.shape == tensor.shape
        assert torch.equal(back.full_tensor(), whole)
        assert platform.traffic.copies == [[NUM_BYTES], [NUM_BYTES]]
    finally:
        dist.destroy_process_group()


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_trains_to_the_same_bits(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch, recomputes: bool, dtype: Any
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    training = TrainingConfig(
        dtype=dtype, gradient_checkpointing=recomputes, activation_offload=True
    )
    engines = []
    platform = ApartPlatform()
    for each in (platform, CPUPlatform()):
        engine = FSDP2Engine(EngineSpec(qwen3_dir, training, OptimizerConfig(lr=1e-2), 9, each, 0))
        engine.initialize()
        for _ in range(2):
            engine.train_batch(BATCH, sft)
        engines.append({name: t.clone() for name, t in engine.get_per_tensor_param()})
    assert all(torch.equal(engines[0][name], engines[1][name]) for name in engines[1])
    inbound, outbound = max(
        zip(platform.traffic.copies[::2], platform.traffic.copies[1::2], strict=True),
        key=lambda pair: sum(pair[1]),
    )
    assert 0 < sum(inbound) <= sum(outbound)
