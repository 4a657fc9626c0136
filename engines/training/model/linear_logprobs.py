"""Logprobs of given tokens from hidden states, without all logits in memory.

Only a few tiles of logits exist at a time; the backward pass recomputes them. Softmax statistics
and sums of gradients are float32 (float64 for float64 inputs); logits are rounded to the dtype of
the inputs, as by the model's own head. Does not cover: soft-capped logits, second derivatives.
Letters: N predicting positions, D model width, V vocabulary.

Logprobs of K tokens per position from hidden states, without all logits in memory.

On-policy distillation needs the student's logprobs of its teacher's tokens, with gradient.
Works like `linear_logprobs`, with the same tiles and equal numbers for equal tokens.
Letters: N predicting positions, D model width, V vocabulary, K tokens of each position.

Computes the readouts of a language model's head as rows of numbers, tile by tile.

All backends use this order of rows (`engines.training.outputs` names them). Never holds all logits.
Letters: N predicting positions, D model width, V vocabulary, K other tokens of each position.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines import collectives
from engines.training.model.linear_tiles import (
    DEFAULT_CHUNK_ELEMENTS,
    GradientSums,
    LogitSlopes,
    RowStatistics,
    check_inputs,
    gradient_of_logits,
    no_statistics,
    places,
    scale_of,
    scaled,
    slices,
    statistics_dtype,
    tile,
    tile_shape,
)
from engines.training.model.linear_topk import linear_topk_logprobs
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
        entropy: also compute the entropy of each row's distribution, in nats.
        sum_pi_squared: also compute the sum of squared probabilities, without gradient.
        chunk_elements: maximum logits of a tile; changes results by rounding only.
        group: ranks that hold different rows of the weights, with equal hidden states and tokens;
            None: this rank holds all rows.
        first_token: token id of this rank's first row of the weights.

    Returns:
        Each (N,) float32, float64 for float64 inputs.

    Raises:
        ValueError: dtypes differ, or `chunk_elements` is below 1.
    """
    check_inputs(hidden_ND, weight_VD, bias_V, chunk_elements)
    logprobs_N, entropy_N, squares_N = cast(
        tuple[Tensor, Tensor, Tensor],
        _LinearTokenLogprobs.apply(
            hidden_ND, weight_VD, bias_V, token_ids_N - first_token,
            scale_of(hidden_ND, temperature), entropy, sum_pi_squared, chunk_elements, group,
        ),
    )  # fmt: skip
    return TokenReadouts(
        logprobs_N, entropy_N if entropy else None, squares_N if sum_pi_squared else None
    )


class _LinearTokenLogprobs(torch.autograd.Function):
    """Online softmax over tiles (arXiv:1805.02867); the backward pass recomputes each tile."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, token_ids_N: Tensor,
        scale: Tensor | None, entropy: bool, squares: bool, chunk_elements: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        num_rows, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
        rows_size, columns_size = tile_shape(hidden_ND, weight_VD, chunk_elements)
        dtype = statistics_dtype(hidden_ND)
        parts: list[RowStatistics] = []
        for rows in slices(num_rows, rows_size):
            part = RowStatistics(token_ids_N[rows], dtype, entropy, squares)
            for columns in slices(vocabulary, columns_size):
                part.add(tile(hidden_ND, weight_VD, bias_V, rows, columns), scale, columns)
            parts.append(part)
        statistics = RowStatistics(token_ids_N, dtype, entropy, squares)
        statistics.take(parts)
        if group is not None:
            statistics.sum_over(group)
        log_sum_N, logprobs_N = statistics.log_sum(), statistics.logprobs()
        entropy_N = statistics.entropy() if entropy else logprobs_N.new_empty(0)
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, token_ids_N, log_sum_N, entropy_N, scale
        )
        ctx.tile_shape = rows_size, columns_size
        squares_N = statistics.sum_pi_squared() if squares else logprobs_N.new_empty(0)
        ctx.mark_non_differentiable(squares_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, token_ids_N, log_sum_N, entropy_N, scale = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N, _ = grad_outputs
        if grad_logprobs_N is None:  # a loss of the entropy alone
            grad_logprobs_N = torch.zeros_like(log_sum_N)
        with_entropy = grad_entropy_N is not None and entropy_N.numel() > 0
        rows_size, columns_size = ctx.tile_shape
        sums = GradientSums(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad)
        # Outer loop over the vocabulary: the float32 sum of weight gradients is one tile wide.
        for columns in slices(weight_VD.shape[0], columns_size):
            sums.begin(columns)
            for rows in slices(hidden_ND.shape[0], rows_size):
                place_R1, inside_R = places(token_ids_N[rows], columns)
                slopes = LogitSlopes(
                    grad_logprobs_N[rows, None], place_R1, inside_R[:, None], log_sum_N[rows],
                    entropy_N[rows] if with_entropy else None,
                    grad_entropy_N[rows] if with_entropy else None,
                )  # fmt: skip
                logits_RC = tile(hidden_ND, weight_VD, bias_V, rows, columns)
                sums.add(gradient_of_logits(logits_RC, scale, slopes), rows)
            sums.end()
        return *sums.gradients(), None, None, None, None, None, None


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

    The result is float32, or float64 for float64 inputs, with gradients as there.

    Args:
        token_ids_NK: int64, each in [0, V); a row may name a token twice.

    Raises:
        ValueError: dtypes differ, or `chunk_elements` is below 1.
    """
    check_inputs(hidden_ND, weight_VD, bias_V, chunk_elements)
    return cast(
        Tensor,
        _LinearLogprobs.apply(
            hidden_ND, weight_VD, bias_V, token_ids_NK - first_token,
            scale_of(hidden_ND, temperature), chunk_elements, group,
        ),
    )  # fmt: skip


class _LinearLogprobs(torch.autograd.Function):
    """Like `linear_logprobs` for K tokens: the gradient of a logit is sum_k g_k (1[k] - p)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None,
        token_ids_NK: Tensor, scale: Tensor | None, chunk_elements: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:  # fmt: skip
        rows_size, columns_size = tile_shape(hidden_ND, weight_VD, chunk_elements)
        chosen_NK = hidden_ND.new_zeros(token_ids_NK.shape, dtype=statistics_dtype(hidden_ND))
        parts: list[RowStatistics] = []
        for rows in slices(hidden_ND.shape[0], rows_size):
            part, chosen_RK = no_statistics(hidden_ND[rows]), chosen_NK[rows]
            for columns in slices(weight_VD.shape[0], columns_size):
                logits_RC = tile(hidden_ND, weight_VD, bias_V, rows, columns)
                place, inside = _places_of_all(token_ids_NK[rows], columns)
                own_RK = scaled(logits_RC.gather(1, place), scale)
                chosen_RK.copy_(torch.where(inside, own_RK, chosen_RK))
                part.add(logits_RC, scale, columns)
            parts.append(part)
        statistics = no_statistics(hidden_ND)
        statistics.take(parts)
        if group is not None:
            statistics.sum_over(group)
            collectives.all_reduce(chosen_NK, group)
        log_sum_N = statistics.log_sum()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, token_ids_NK, log_sum_N, scale)
        ctx.tile_shape = rows_size, columns_size
        return chosen_NK.sub_(log_sum_N[:, None])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, token_ids_NK, log_sum_N, scale = ctx.saved_tensors
        (grad_NK,) = grad_outputs
        rows_size, columns_size = ctx.tile_shape
        sums = GradientSums(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad)
        for columns in slices(weight_VD.shape[0], columns_size):
            sums.begin(columns)
            for rows in slices(hidden_ND.shape[0], rows_size):
                place, inside = _places_of_all(token_ids_NK[rows], columns)
                slopes = LogitSlopes(grad_NK[rows], place, inside, log_sum_N[rows])
                logits_RC = tile(hidden_ND, weight_VD, bias_V, rows, columns)
                sums.add(gradient_of_logits(logits_RC, scale, slopes), rows)
            sums.end()
        return *sums.gradients(), None, None, None, None


def _places_of_all(token_ids_RK: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return `places` of (R, K) tokens."""
    place, inside = places(token_ids_RK.flatten(), columns)
    return place.view_as(token_ids_RK), inside.view_as(token_ids_RK)


_EXACT = 1 << 24
"""Integers up to this are exact in float32: token ids are rows beside the logprobs."""


@dataclass(frozen=True)
class Targets:
    """What the head computes: int64 tokens that hidden states predict, and other readouts."""

    token_ids_N: Tensor
    temperature: float
    readouts: Readouts
    other_ids_NK: Tensor | None = None


def targets_of(
    batch: TokenBatch, read_N: Tensor, temperature: float, readouts: Readouts
) -> Targets:  # fmt: skip
    """Return the targets at places from `read_positions`; of the last token for place T."""
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

    Rows: logprobs; entropies; sums of squared probabilities; logprobs of K tokens; their ids.

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
    if found.entropy_N is not None and not asked.entropy_gradient:
        found = found._replace(entropy_N=found.entropy_N.detach())
    rows = [found.stacked()]
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
