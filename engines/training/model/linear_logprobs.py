"""Logprobs of given tokens from hidden states, without all logits in memory.

Only a few tiles of logits exist at a time; the backward pass recomputes them. Softmax statistics
and sums of gradients are float32 (float64 for float64 inputs); logits are rounded to the dtype of
the inputs, as by the model's own head. Does not cover: soft-capped logits, second derivatives.
Letters: N predicting positions, D model width, V vocabulary.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines.training.model.linear_tiles import (
    DEFAULT_CHUNK_ELEMENTS,
    GradientSums,
    RowStatistics,
    check_inputs,
    places,
    scale_of,
    slices,
    tile,
    tile_shape,
)
from engines.training.model.logprobs import TokenReadouts
from engines.training.model.tile_math import LogitSlopes, gradient_of_logits, statistics_dtype


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
