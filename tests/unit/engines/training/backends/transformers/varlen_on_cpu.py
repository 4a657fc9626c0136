"""Kernels of torch's variable-length attention for a CPU, written out; importing registers them.

Torch has this operator for GPUs alone. With them, a layer is traced here as it is on a GPU, where
attention is a part of the compiled graph.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float | None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield place, query, key and value of each sequence, (heads, S, D), and masked scores."""
    groups, factor = q.shape[1] // k.shape[1], scale or 1 / math.sqrt(q.shape[-1])
    edges = bounds.tolist()
    for place in map(slice, edges, edges[1:]):
        query, key, value = (x[place].float().transpose(0, 1) for x in (q, k, v))
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        later = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(1, 2) * factor).masked_fill(later, -math.inf)
        yield place, query, key, value, scores


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, bounds_k: Tensor, longest: int,
    longest_k: int, is_causal: bool = False, scale: float | None = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert is_causal
    assert longest == int((bounds[1:] - bounds[:-1]).max())
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float)
    for place, _q, _k, value, scores in _sequences(q, k, v, bounds, scale):
        out[place] = (scores.softmax(-1) @ value).transpose(0, 1).to(q.dtype)
        sums[:, place] = scores.logsumexp(-1)
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: Tensor,
    bounds_k: Tensor, longest: int, longest_k: int, is_causal: bool, state: Tensor,
    scale: float | None = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups, factor = q.shape[1] // k.shape[1], scale or 1 / math.sqrt(q.shape[-1])
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for place, query, key, value, scores in _sequences(q, k, v, bounds, scale):
        upstream, weights = grad[place].float().transpose(0, 1), scores.softmax(-1)
        inner = upstream @ value.transpose(1, 2)
        slope = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * factor
        parts = slope @ key, slope.transpose(1, 2) @ query, weights.transpose(1, 2) @ upstream
        for into, part, num_shared in zip(grads, parts, (1, groups, groups), strict=True):
            summed = part.unflatten(0, (-1, num_shared)).sum(1)
            into[place] = summed.transpose(0, 1).to(into.dtype)
    return grads


operators: Any = varlen
operators._varlen_attn.register_kernel("cpu")(_forward)
operators._varlen_attn_backward.register_kernel("cpu")(_backward)
