"""Ulysses sequence parallelism (arXiv:2309.14509).

Each rank of a group holds an equal, contiguous slice of the packed row. Around attention an
all-to-all turns (all heads, T / n tokens) into (heads / n, all T tokens) and back.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.collectives import all_to_all
from engines.types import TokenBatch
from infra.errors import ConfigError


@dataclass(frozen=True)
class SequenceSlice:
    """This rank's slice of a packed row, which is padded to a multiple of the group's size.

    Attributes:
        cu_seqlens: (B + 1,) or (B + 2,) int32 of the whole padded row; padding is a sequence.
        start: index of the slice's first token in the whole row.
    """

    input_ids_S: Tensor
    position_ids_S: Tensor
    cu_seqlens: Tensor
    start: int


def slice_sequence(
    batch: TokenBatch, rank: int, size: int, *, multiple: int = 1
) -> SequenceSlice:  # fmt: skip
    """Return the slice of one rank, with a length that is a multiple of `multiple`."""
    padding = -batch.num_tokens % (size * multiple)
    ids_T, position_T, cu_seqlens = batch.input_ids_T, batch.position_ids_T, batch.cu_seqlens
    if padding:
        ids_T = torch.cat([ids_T, ids_T.new_zeros(padding)])
        position_T = torch.cat([position_T, torch.arange(padding, device=ids_T.device)])
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
    length = ids_T.numel() // size
    own = slice(rank * length, (rank + 1) * length)
    return SequenceSlice(ids_T[own], position_T[own], cu_seqlens, rank * length)


def heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(1, heads, S, head_dim) of this rank's tokens -> (1, heads / n, n * S, head_dim)."""
    size = dist.get_world_size(group)
    if x.shape[1] % size:
        raise ConfigError(
            "training.ulysses_size",
            f"got {size}; need a divisor of the {x.shape[1]} attention heads",
        )
    # (n, heads / n, S, D): one block of heads per rank; after the exchange one block of tokens.
    sent = x.squeeze(0).unflatten(0, (size, -1))
    received = _AllToAll.apply(sent, group)
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(1, n * S, heads / n, head_dim), as attention returns it -> (1, S, heads, head_dim)."""
    size = dist.get_world_size(group)
    sent = x.squeeze(0).unflatten(0, (size, -1))
    received = _AllToAll.apply(sent, group)
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def repeated_kv(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Repeat key or value heads (1, kv, S, D) if there are fewer than ranks."""
    size, num_heads = dist.get_world_size(group), x.shape[1]
    if num_heads % size == 0:
        return x
    if size % num_heads:
        raise ConfigError(
            "training.ulysses_size",
            f"got {size}; need a divisor or a multiple of the {num_heads} key-value heads",
        )
    return x.repeat_interleave(size // num_heads, dim=1)


class _AllToAll(torch.autograd.Function):
    """Exchange blocks of dimension 0; the backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad_outputs[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_to_all(x.contiguous(), group)
