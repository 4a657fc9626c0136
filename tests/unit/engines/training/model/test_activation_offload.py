"""Activations that wait on the host; on a CPU a copy of them stands for that."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from engines.training.engine_backend import from_host, to_host

SIZE = 256


def gradients(weight: Tensor, x: Tensor) -> list[Tensor]:
    """Of some loss, by the weight and the input."""
    weight, x = weight.detach().requires_grad_(), x.detach().requires_grad_()
    loss = torch.nn.functional.silu(x @ weight).square().mean()
    loss.backward()
    assert weight.grad is not None
    assert x.grad is not None
    return [weight.grad, x.grad]


def test_gradients_are_the_same_and_copies_are_what_is_kept() -> None:
    weight, x = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    copied: list[Tensor] = []

    def pack(tensor: Tensor) -> object:
        packed = to_host(tensor)
        if packed is not tensor:
            copied.append(tensor)
        return packed

    plain = gradients(weight, x)
    with saved_tensors_hooks(pack, from_host):
        moved = gradients(weight, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert copied


def test_weights_and_small_tensors_stay() -> None:
    weight = nn.Parameter(torch.randn(SIZE, SIZE))
    small = torch.randn(8)
    assert to_host(weight) is weight
    assert to_host(weight.t()) is not None
    assert isinstance(to_host(weight.t()), Tensor)
    assert to_host(small) is small


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_tensor_that_is_cut_over_ranks_comes_back_as_one(
    placement: Replicate | Shard, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.randn(SIZE, SIZE)
        tensor = distribute_tensor(whole, mesh, [placement])
        packed = to_host(tensor)
        assert packed is not tensor
        back = from_host(packed)
        assert isinstance(back, DTensor)
        assert back.placements == tensor.placements
        assert back.shape == tensor.shape
        assert torch.equal(back.full_tensor(), whole)
    finally:
        dist.destroy_process_group()
