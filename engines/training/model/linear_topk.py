"""The K most likely tokens of each position straight from hidden states; the logits never exist.

What on-policy distillation asks of a teacher; `linear_tokens` is what it asks of a student.
Promises: a few tiles of logits exist at any moment. Of the same inputs and `chunk_elements` the
logits are those of `linear_tokens`, to the bit; so a student that equals its teacher has its
teacher's numbers. Of equally likely tokens the lowest id comes first, whatever the tiles and the
shards.
The vocabulary may be cut over the ranks of a group, by rows of the weights; a rank may have none.
Does not cover: soft-capped logits, gradients.
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
    slices,
    tile,
    tile_shape,
)
from engines.training.model.tile_math import scaled, statistics_dtype

_NO_TOKEN = torch.iinfo(torch.int64).max
"""Fills the places of a rank with fewer than K tokens; behind every token of equal logit."""


class TopTokens(NamedTuple):
    """The most likely tokens of each position, the likeliest first, of equals the lowest id.

    Attributes:
        ids_NK: (N, K) int64, distinct in each row.
        logprobs_NK: (N, K) float32, float64 where the inputs are; without gradient.
    """

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
    """The K most likely tokens of each row, without gradient; arguments as `linear_logprobs_of`.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), or this rank's rows of it.
        num_top: K, at most the size of the whole vocabulary; a rank may hold fewer rows.
        bias_V: (V,), or this rank's part.
        temperature: of the distribution; changes no order.
        chunk_elements: most logits of a tile; beside them as many int32 exist, and booleans.
        group: ranks that hold the rows of the weights.
        first_token: the token that this rank's first row stands for.
        below: only tokens with a lower id are taken; None: any. All have part in the distribution.

    Returns:
        The same on every rank of the group.

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
            # Scaled in place, or a tensor of its own beside the logits.
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
    """J candidates of each of R rows: (R, J) logits and int64 tokens."""

    logits_RJ: Tensor
    ids_RJ: Tensor


def _unset_best(hidden_RD: Tensor, size: int) -> _Best:
    logits = hidden_RD.new_empty(hidden_RD.shape[0], size, dtype=statistics_dtype(hidden_RD))
    return _Best(logits, torch.empty_like(logits, dtype=torch.int64))


def _best_of_tile(z_RC: Tensor, num_top: int, first_token: int) -> _Best:
    """The largest logits of a tile, in any order; of equal ones the first.

    `topk` alone may take any of equal logits; bfloat16 ones are often equal. It does say what the
    smallest logit is that is taken, and then those above come first and the rest by their place.
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
    """The largest logits of all candidates, sorted; of equal ones the lowest token."""
    logits, ids = (torch.cat(each, dim=1) for each in zip(*several, strict=True))
    by_id = ids.argsort(dim=1)
    logits, ids = logits.gather(1, by_id), ids.gather(1, by_id)
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :num_top]
    return _Best(logits.gather(1, order), ids.gather(1, order))


def _best_over(own: _Best, num_top: int, group: dist.ProcessGroup) -> _Best:
    """The best of all ranks, the same on every one; ranks may have fewer than asked for."""
    missing = (0, num_top - own.ids_RJ.shape[1])
    logits = torch.nn.functional.pad(own.logits_RJ, missing, value=-torch.inf)
    ids = torch.nn.functional.pad(own.ids_RJ, missing, value=_NO_TOKEN)
    pairs = zip(
        collectives.all_gather(logits, group), collectives.all_gather(ids, group), strict=True
    )
    return _best_of([_Best(*pair) for pair in pairs], num_top)


def _vocabulary(weight_VD: Tensor, group: dist.ProcessGroup | None) -> int:
    """Rows of all ranks of the group."""
    if group is None:
        return weight_VD.shape[0]
    total = torch.tensor([weight_VD.shape[0]], device=weight_VD.device)
    collectives.all_reduce(total, group)
    return int(total)
