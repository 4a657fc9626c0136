"""Causal attention over packed sequences: `rl_varlen`, for the language models in training.

T tokens of B sequences are concatenated in one row, without padding or a T x T mask. The keyword
argument `packing` carries the layout through the model. On CPU, and for float32 on a GPU,
neighbouring sequences of equal length are one batched SDPA call; in bf16/fp16 on a GPU it is
`torch.nn.attention.varlen.varlen_attn`. Dropout is ignored: training and inference need the same
logprobs. Always call the model with `use_cache=False, attention_mask=None`.

With Ulysses sequence parallelism (arXiv:2309.14509), each rank of a group holds an equal and
contiguous slice of the packed row. Around attention an all-to-all turns (all heads, T / n tokens)
into (heads / n, all T tokens) and back.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engines.collectives import all_to_all
from engines.types import TokenBatch
from infra.errors import ConfigError


@dataclass(frozen=True)
class SequenceSlice:
    """This rank's slice of a packed row, which is padded to a multiple of the group's size.

    Attributes:
        cu_seqlens: (B + 1,) int32 of the whole row, (B + 2,) if padding is its last sequence.
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
    """Exchange (1, heads, S, head_dim) of own tokens for (1, heads / n, n * S, head_dim)."""
    size = dist.get_world_size(group)
    if x.shape[1] % size:
        raise ConfigError(
            "training.ulysses_size",
            f"got {size}; need a divisor of the {x.shape[1]} attention heads",
        )
    return tokens_for_heads(x, group)


def tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange attention's (1, n * S, heads / n, head_dim) for (1, S, heads, head_dim)."""
    # (n, S, heads / n, D): one block per rank; each rank gets one block of all others.
    sent = x.squeeze(0).unflatten(0, (dist.get_world_size(group), -1))
    return cast(Tensor, _AllToAll.apply(sent, group)).transpose(0, 1).flatten(1, 2).unsqueeze(0)


def repeated_kv(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Repeat key or value heads (1, kv, S, D) if there are fewer than ranks."""
    size, num_heads = dist.get_world_size(group), x.shape[1]
    if num_heads % size and size % num_heads:
        raise ConfigError(
            "training.ulysses_size",
            f"got {size}; need a divisor or a multiple of the {num_heads} key-value heads",
        )
    return x if num_heads % size == 0 else x.repeat_interleave(size // num_heads, dim=1)


class _AllToAll(torch.autograd.Function):
    """Exchange blocks of dimension 0; the backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad_outputs[0].contiguous(), ctx.group), None


ATTENTION_NAME = "rl_varlen"
_VARLEN_PARAMETERS = frozenset(inspect.signature(varlen.varlen_attn).parameters)
"""Parameters of the installed kernel; they differ between torch releases."""
_REFUSED = ("softcap", "s_aux", "position_bias", "cache")


@dataclass(frozen=True)
class Packing:
    """Bounds of each sequence in a packed row.

    Attributes:
        cu_seqlens: (B + 1,) int32 on the model's device.
        runs: (number of neighbouring sequences of equal length, that length), in order.
        ulysses_group: ranks that hold equal slices of the row; None: the row is whole.
    """

    cu_seqlens: Tensor
    runs: tuple[tuple[int, int], ...]
    max_length: int
    ulysses_group: dist.ProcessGroup | None = None

    @staticmethod
    def from_cu_seqlens(
        cu_seqlens: Tensor, ulysses_group: dist.ProcessGroup | None = None
    ) -> "Packing":
        """Derive the layout; copies the lengths to the host, once for all layers."""
        lengths: Sequence[int] = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        runs = tuple((len(list(same)), length) for length, same in groupby(lengths) if length)
        return Packing(cu_seqlens, runs, max(lengths, default=0), ulysses_group)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, with the signature of transformers' attention functions.

    The result is (1, T, heads, head_dim), without attention weights.

    Args:
        query: (1, heads, T, head_dim); T is the length of this rank's slice with a group.
        key: (1, kv_heads, T, head_dim), like `value`; heads is a multiple of kv_heads.
        scaling: factor of the scores; None is 1 / sqrt(head_dim).
        sliding_window: number of tokens that a token sees, itself included.
        **kwargs: ignored, except those in `_REFUSED`, which change the result.

    Raises:
        ConfigError: the architecture needs an attention feature that is not supported.
    """
    if packing is None:
        raise ConfigError(
            "model.path",
            f"its {type(module).__name__} is not told where packed sequences end; choose another "
            "architecture",
        )
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if not getattr(module, "is_causal", True):
        refused.append("later tokens")
    if refused or attention_mask is not None or query.shape[0] != 1:
        raise ConfigError(
            "model.path",
            f"its attention needs {', '.join(refused) or 'a mask'}, "
            f"which {ATTENTION_NAME} does not support; choose another architecture",
        )
    group = packing.ulysses_group
    if group is not None:
        key, value = repeated_kv(key, group), repeated_kv(value, group)
        query, key, value = (heads_for_tokens(x, group) for x in (query, key, value))
    rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    window = sliding_window if sliding_window and sliding_window < packing.max_length else None
    is_fused = query.device.type != "cpu" and query.dtype != torch.float32
    attend: Any = _varlen if is_fused else _batched_runs
    out = attend(rows, packing, scaling, window).unsqueeze(0)
    return out if group is None else tokens_for_heads(out, group), None


# Runs differ between batches: traced into a compiled layer, they would recompile it each time.
@torch.compiler.disable
def _batched_runs(
    rows: list[Tensor], packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Run one SDPA call per run of equal lengths; (T, heads, head_dim) in and out."""
    sizes = [count * length for count, length in packing.runs]
    outputs: list[Tensor] = []
    for (count, length), *parts in zip(
        packing.runs, *(row.split(sizes) for row in rows), strict=True
    ):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        mask = _window_mask(length, window, q.device) if window and window < length else None
        if q.device.type != "cpu" and q.shape[1] != k.shape[1]:
            # On CUDA, float32 with `enable_gqa` has only the kernel that keeps all scores.
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return a (length, length) bool mask: causal, `window` tokens, itself included."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _varlen(
    rows: list[Tensor], packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Run the fused GPU kernel; (T, heads, head_dim) in and out."""
    q, k, v = rows
    options: dict[str, Any] = {}
    if "scale" in _VARLEN_PARAMETERS:
        options["scale"] = scaling
    elif scaling is not None:
        # The kernel scales by 1 / sqrt(head_dim) itself.
        q = q * (scaling * math.sqrt(q.shape[-1]))
    if "window_size" in _VARLEN_PARAMETERS:
        options["window_size"] = (window - 1 if window else -1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise ConfigError("model.path", "its sliding window needs torch >= 2.12; upgrade torch")
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _VARLEN_PARAMETERS:
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    bounds, longest = packing.cu_seqlens, packing.max_length
    return cast(Tensor, varlen.varlen_attn(q, k, v, bounds, bounds, longest, longest, **options))


def register_packed_attention() -> None:
    """Register `rl_varlen` with transformers; may be repeated."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
