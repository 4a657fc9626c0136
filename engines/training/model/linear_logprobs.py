"""The readouts of a language model's head, from hidden states, without all logits in memory.

`linear_token_logprobs` returns logprobs of one token per position, `linear_logprobs_of` those of K
tokens (on-policy distillation needs them from the student), `linear_topk_logprobs` the K most
likely tokens (needed from the teacher), and `head_rows` all readouts, as rows in the order of
`engines.training.outputs`.

Promises: only a few tiles of logits exist at a time; the backward pass recomputes them. Softmax
statistics and sums of gradients are float32 (float64 for float64 inputs); logits are rounded to the
dtype of the inputs, as by the model's own head. For equal inputs and `chunk_elements` all functions
have bit-identical logits, so a student equal to its teacher has its logprobs. Among equally
likely tokens the lowest id comes first, for all tiles and shards.
Does not cover: soft-capped logits, second derivatives.
Letters: N predicting positions, D model width, V vocabulary, K other tokens of each position.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines import collectives
from engines.training.model.linear_tiles import (
    DEFAULT_CHUNK_ELEMENTS,
    LogitSlopes,
    RowStatistics,
    check_inputs,
    places,
    scale_of,
    scaled,
    slices,
    statistics_dtype,
    tile,
    tile_shape,
    tiled_gradients,
)
from engines.training.model.logprobs import TokenReadouts
from engines.types import Readouts, TokenBatch


def linear_token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    token_ids_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
) -> TokenReadouts:
    """Return logprobs of one token per row under softmax((hidden @ weight.T + bias) / temperature).

    Gradients flow from logprobs and entropies to hidden states, weights and bias. With a group,
    results are the same on every rank, and their gradients have to be; the gradient of the hidden
    states is this rank's part of a sum over the group.

    Args:
        hidden_ND: float32, bfloat16, float16 or float64; weights and bias have the same dtype.
        token_ids_N: int64, each in [0, V).
        bias_V: finite.
        entropy, sum_pi_squared: also compute these of each row, the latter without gradient.
        chunk_elements: maximum logits of a tile; changes results by rounding only.
        group: ranks with other rows of the weights (`first_token` on) and equal hidden states and
            tokens; None: this rank holds all rows.

    Returns:
        Each (N,) float32, float64 for float64 inputs; entropies in nats.

    Raises:
        ValueError: dtypes differ, or `chunk_elements` is below 1.
    """
    check_inputs(hidden_ND, weight_VD, bias_V, chunk_elements)
    logprobs_N1, entropy_N, squares_N = cast(
        tuple[Tensor, Tensor, Tensor],
        _LinearLogprobs.apply(
            hidden_ND, weight_VD, bias_V, token_ids_N[:, None] - first_token,
            scale_of(hidden_ND, temperature), entropy, sum_pi_squared, chunk_elements, group,
        ),
    )  # fmt: skip
    return TokenReadouts(
        logprobs_N1.squeeze(1), entropy_N if entropy else None,
        squares_N if sum_pi_squared else None,
    )  # fmt: skip


def linear_logprobs_of(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    token_ids_NK: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
) -> Tensor:
    """Return (N, K) logprobs of K tokens per row; see `linear_token_logprobs`.

    The result is float32, or float64 for float64 inputs, with the same gradients.

    Args:
        token_ids_NK: int64, each in [0, V); a row may name a token twice.

    Raises:
        ValueError: dtypes differ, or `chunk_elements` is below 1.
    """
    check_inputs(hidden_ND, weight_VD, bias_V, chunk_elements)
    return cast(
        tuple[Tensor, Tensor, Tensor],
        _LinearLogprobs.apply(
            hidden_ND, weight_VD, bias_V, token_ids_NK - first_token,
            scale_of(hidden_ND, temperature), False, False, chunk_elements, group,
        ),
    )[0]  # fmt: skip


class _LinearLogprobs(torch.autograd.Function):
    """Online softmax over tiles (arXiv:1805.02867); the backward pass recomputes each tile.

    Gives the logprobs of K tokens of each row, entropies, and sums of squared probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None,
        token_ids_NK: Tensor, scale: Tensor | None, entropy: bool, squares: bool,
        chunk_elements: int, group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows_size, columns_size = tile_shape(hidden_ND, weight_VD, chunk_elements)
        chosen_NK = hidden_ND.new_zeros(token_ids_NK.shape, dtype=statistics_dtype(hidden_ND))
        statistics = RowStatistics(hidden_ND, entropy=entropy, squares=squares)
        parts: list[RowStatistics] = []
        for rows in slices(hidden_ND.shape[0], rows_size):
            parts.append(RowStatistics(hidden_ND[rows], entropy=entropy, squares=squares))
            chosen_RK = chosen_NK[rows]
            for columns in slices(weight_VD.shape[0], columns_size):
                logits_RC = tile(hidden_ND, weight_VD, bias_V, rows, columns)
                place_RK, inside_RK = places(token_ids_NK[rows], columns)
                own_RK = scaled(logits_RC.gather(1, place_RK), scale)
                chosen_RK.copy_(torch.where(inside_RK, own_RK, chosen_RK))
                parts[-1].add(logits_RC, scale)
                del logits_RC  # it would stay alive while the next tile is computed
        statistics.take(parts)
        if group is not None:
            statistics.sum_over(group)
            collectives.all_reduce(chosen_NK, group)
        log_sum_N = statistics.log_sum()
        entropy_N, squares_N = statistics.readouts()
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, token_ids_NK, log_sum_N, entropy_N, scale
        )
        ctx.tile_shape = rows_size, columns_size
        ctx.mark_non_differentiable(squares_N)
        ctx.set_materialize_grads(False)
        return chosen_NK.sub_(log_sum_N[:, None]), entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, token_ids_NK, log_sum_N, entropy_N, scale = ctx.saved_tensors
        grad_NK, grad_entropy_N, _ = grad_outputs
        if grad_NK is None:  # a loss of the entropy alone
            grad_NK = log_sum_N.new_zeros(token_ids_NK.shape)
        with_entropy = grad_entropy_N is not None and entropy_N.numel() > 0

        def slopes_of(rows: slice, columns: slice) -> LogitSlopes:
            place_RK, inside_RK = places(token_ids_NK[rows], columns)
            return LogitSlopes(
                grad_NK[rows], place_RK, inside_RK, log_sum_N[rows],
                entropy_N[rows] if with_entropy else None,
                grad_entropy_N[rows] if with_entropy else None,
            )  # fmt: skip

        gradients = tiled_gradients(
            hidden_ND, weight_VD, bias_V, scale, ctx.tile_shape, ctx.needs_input_grad, slopes_of
        )
        return *gradients, None, None, None, None, None, None


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
        num_top: K, at most the number of allowed tokens; a rank may hold fewer rows.
        chunk_elements: maximum logits of a tile; as many int32 and bool elements exist beside them.
        below: return only tokens with a lower id, though all count in the distribution; None: any.

    Raises:
        ValueError: dtypes differ, `chunk_elements` is below 1, or `num_top` is out of range; the
            last on all ranks of the group.
    """
    check_inputs(hidden_ND, weight_VD, bias_V, chunk_elements)
    vocabulary = weight_VD.shape[0]
    if group is not None:
        total = torch.tensor([vocabulary], device=weight_VD.device)
        collectives.all_reduce(total, group)
        vocabulary = int(total)
    below = vocabulary if below is None else min(below, vocabulary)
    if not 1 <= num_top <= below:
        raise ValueError(f"most likely tokens: got {num_top}; need 1 to {below}")
    rows_size, columns_size = tile_shape(hidden_ND, weight_VD, chunk_elements)
    scale = scale_of(hidden_ND, temperature)
    statistics, best = RowStatistics(hidden_ND), _unset_best(hidden_ND, num_top)
    parts: list[tuple[RowStatistics, _Best]] = []
    for rows in slices(hidden_ND.shape[0], rows_size):
        part, best_part = RowStatistics(hidden_ND[rows]), _unset_best(hidden_ND[rows], 0)
        for columns in slices(weight_VD.shape[0], columns_size):
            logits_RC = tile(hidden_ND, weight_VD, bias_V, rows, columns)
            z_RC = scaled(logits_RC, scale)
            first = first_token + columns.start
            candidates_RC = z_RC[:, : max(0, below - first)]
            if candidates_RC.shape[1]:
                found = _best_of_tile(candidates_RC, num_top, first)
                best_part = _best_of([best_part, found], num_top)
            # If `z_RC` is `logits_RC`, it is already scaled in place.
            part.add(logits_RC, None if z_RC is logits_RC else scale)
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


_EXACT = 1 << 24
"""Integers up to this are exact in float32, the dtype in which `head_rows` returns token ids."""


@dataclass(frozen=True)
class Targets:
    """Request to a head: the int64 tokens that hidden states predict, and further readouts."""

    token_ids_N: Tensor
    temperature: float
    readouts: Readouts
    other_ids_NK: Tensor | None = None


def targets_of(
    batch: TokenBatch, read_N: Tensor, temperature: float, readouts: Readouts
) -> Targets:  # fmt: skip
    """Return the targets at places from `read_positions`; place T gets those of the last token."""
    place_N = read_N.clamp(max=batch.num_tokens - 1)
    name = readouts.logprobs_of
    others_NK = batch.columns[name][place_N] if name is not None else None
    return Targets(batch.input_ids_T[place_N], temperature, readouts, others_NK)


def head_rows(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets: Targets,
    *,
    bias_V: Tensor | None = None,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
) -> Tensor:
    """Return (rows, N) with gradient; other arguments are those of `linear_token_logprobs`.

    Rows: logprobs; entropies; sums of squared probabilities; K logprobs; ids of likeliest tokens.

    Raises:
        ValueError: as in `linear_token_logprobs`; K is out of range; or the vocabulary is too large
            for ids in float32.
    """
    asked, others_NK = targets.readouts, targets.other_ids_NK
    share: dict[str, Any] = {
        "bias_V": bias_V, "temperature": targets.temperature, "chunk_elements": chunk_elements,
        "group": group, "first_token": first_token,
    }  # fmt: skip
    if others_NK is not None and not (asked.entropy or asked.sum_pi_squared):
        # One pass over the tiles for all tokens.
        ids_NK = torch.cat([targets.token_ids_N[:, None], others_NK], dim=1)
        return linear_logprobs_of(hidden_ND, weight_VD, ids_NK, **share).T
    found = linear_token_logprobs(
        hidden_ND, weight_VD, targets.token_ids_N, entropy=asked.entropy,
        sum_pi_squared=asked.sum_pi_squared, **share,
    )  # fmt: skip
    rows = [found.read_for(asked).stacked()]
    if others_NK is not None:
        rows.append(linear_logprobs_of(hidden_ND, weight_VD, others_NK, **share).T)
    if asked.num_top:
        if first_token + weight_VD.shape[0] > _EXACT:
            raise ValueError(f"vocabulary: most likely tokens need one of at most {_EXACT} tokens")
        top = linear_topk_logprobs(
            hidden_ND, weight_VD, asked.num_top, below=asked.top_below, **share
        )
        rows += [top.logprobs_NK.T, top.ids_NK.T.to(top.logprobs_NK.dtype)]
    return torch.cat(rows)
