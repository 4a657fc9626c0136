"""The K most likely tokens per position from hidden states, without all logits in memory.

On-policy distillation needs them from the teacher; `linear_tokens` serves the student. For equal
inputs and `chunk_elements`, both have bit-identical logits, so a student equal to its teacher has
the teacher's logprobs. Among equally likely tokens the lowest id comes first, for all tiles and
shards. Does not cover: soft-capped logits, gradients.
Letters: N predicting positions, D model width, V vocabulary, K tokens of each position.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.training.model.linear_tiles import (
    DEFAULT_CHUNK_ELEMENTS,
    RowStatistics,
    check_inputs,
    no_statistics,
    scale_of,
    scaled,
    slices,
    statistics_dtype,
    tile,
    tile_shape,
)

_NO_TOKEN = torch.iinfo(torch.int64).max
"""Pads ranks with fewer than K tokens; sorts after every token of equal logit."""


class TopTokens(NamedTuple):
    """Most likely tokens: distinct int64 ids per row, and logprobs without gradient."""

    ids_NK: Tensor
    logprobs_NK: Tensor


@torch.no_grad()
def linear_topk_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    num_top: int,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
    below: int | None = None,
) -> TopTokens:
    """Return the K most likely tokens of each row, without gradient, on every rank of the group.

    Other arguments are those of `linear_token_logprobs`.

    Args:
        num_top: K, at most the size of the whole vocabulary; a rank may hold fewer rows.
        chunk_elements: maximum logits of a tile; as many int32 and bool elements exist beside them.
        below: return only tokens with a lower id, though all count in the distribution; None: any.

    Raises:
        ValueError: dtypes differ, `chunk_elements` is below 1, or `num_top` is out of range; the
            last on all ranks of the group.
    """
    check_inputs(hidden_ND, weight_VD, bias_V, chunk_elements)
    vocabulary = _vocabulary(weight_VD, group)
    below = vocabulary if below is None else min(below, vocabulary)
    if not 1 <= num_top <= below:
        raise ValueError(f"most likely tokens: got {num_top}; need 1 to {below}")
    rows_size, columns_size = tile_shape(hidden_ND, weight_VD, chunk_elements)
    scale = scale_of(hidden_ND, temperature)
    statistics, best = no_statistics(hidden_ND), _unset_best(hidden_ND, num_top)
    parts: list[tuple[RowStatistics, _Best]] = []
    for rows in slices(hidden_ND.shape[0], rows_size):
        part, best_part = no_statistics(hidden_ND[rows]), _unset_best(hidden_ND[rows], 0)
        for columns in slices(weight_VD.shape[0], columns_size):
            logits_RC = tile(hidden_ND, weight_VD, bias_V, rows, columns)
            z_RC = scaled(logits_RC, scale)
            first = first_token + columns.start
            candidates_RC = z_RC[:, : max(0, below - first)]
            if candidates_RC.shape[1]:
                found = _best_of_tile(candidates_RC, num_top, first)
                best_part = _best_of([best_part, found], num_top)
            # If `z_RC` is `logits_RC`, it is already scaled in place.
            part.add(logits_RC, None if z_RC is logits_RC else scale, columns)
        parts.append((part, best_part))
    if parts:
        statistics.take([part for part, _ in parts])
        best = _Best(*(torch.cat(each) for each in zip(*(b for _, b in parts), strict=True)))
    if group is not None:
        statistics.sum_over(group)
        best = _best_over(best, num_top, group)
    return TopTokens(best.ids_RJ, best.logits_RJ.sub_(statistics.log_sum()[:, None]))


class _Best(NamedTuple):
    logits_RJ: Tensor
    ids_RJ: Tensor


def _unset_best(hidden_RD: Tensor, size: int) -> _Best:
    logits = hidden_RD.new_empty(hidden_RD.shape[0], size, dtype=statistics_dtype(hidden_RD))
    return _Best(logits, torch.empty_like(logits, dtype=torch.int64))


def _best_of_tile(z_RC: Tensor, num_top: int, first_token: int) -> _Best:
    """Return the largest logits of a tile, in any order; the first of equal ones.

    `topk` alone may take any of equal logits, which are frequent in bfloat16; it only serves to
    find the smallest logit to take.
    """
    width = z_RC.shape[1]
    size = min(num_top, width)
    smallest_R1 = z_RC.topk(size, dim=1).values[:, -1:]
    nearness_C = torch.arange(width, 0, -1, dtype=torch.int32, device=z_RC.device)
    rank_RC = (z_RC >= smallest_R1) * nearness_C
    rank_RC.add_(z_RC > smallest_R1, alpha=width)
    place = rank_RC.topk(size, dim=1).indices
    return _Best(z_RC.gather(1, place), place + first_token)


def _best_of(several: list[_Best], num_top: int) -> _Best:
    """Return the largest logits of all candidates, sorted, then by lowest token id."""
    logits, ids = (torch.cat(each, dim=1) for each in zip(*several, strict=True))
    by_id = ids.argsort(dim=1)
    logits, ids = logits.gather(1, by_id), ids.gather(1, by_id)
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :num_top]
    return _Best(logits.gather(1, order), ids.gather(1, order))


def _best_over(own: _Best, num_top: int, group: dist.ProcessGroup) -> _Best:
    """Return the best of all ranks, on every rank; ranks may have fewer than `num_top`."""
    missing = (0, num_top - own.ids_RJ.shape[1])
    logits = torch.nn.functional.pad(own.logits_RJ, missing, value=-torch.inf)
    ids = torch.nn.functional.pad(own.ids_RJ, missing, value=_NO_TOKEN)
    pairs = zip(
        collectives.all_gather(logits, group), collectives.all_gather(ids, group), strict=True
    )
    return _best_of([_Best(*pair) for pair in pairs], num_top)


def _vocabulary(weight_VD: Tensor, group: dist.ProcessGroup | None) -> int:
    if group is None:
        return weight_VD.shape[0]
    total = torch.tensor([weight_VD.shape[0]], device=weight_VD.device)
    collectives.all_reduce(total, group)
    return int(total)
