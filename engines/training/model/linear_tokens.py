"""Logprobs of K tokens per position from hidden states, without all logits in memory.

On-policy distillation needs the student's logprobs of its teacher's tokens, with gradient.
Works like `linear_logprobs`, with the same tiles and equal numbers for equal tokens.
Letters: N predicting positions, D model width, V vocabulary, K tokens of each position.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines import collectives
from engines.training.model.linear_tiles import (
    DEFAULT_CHUNK_ELEMENTS,
    GradientSums,
    RowStatistics,
    check_inputs,
    no_statistics,
    places,
    scale_of,
    slices,
    tile,
    tile_shape,
)
from engines.training.model.tile_math import (
    LogitSlopes,
    gradient_of_logits,
    scaled,
    statistics_dtype,
)


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
