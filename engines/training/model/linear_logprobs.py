"""Log-probabilities of given tokens straight from hidden states: the logits never exist at once.

Promises: at any moment a few tiles of logits of `chunk_elements` exist, whatever the number of
tokens and the vocabulary; between forward and backward only inputs and two numbers per row are
kept; the backward pass computes the tiles anew (one extra product with the head's weights).
Float32 softmax statistics, and float32 sums of gradients over tiles (float64 for float64 inputs);
the same numbers with and without gradient. Logits are rounded to the dtype of the inputs, as the
model's own head does.
The vocabulary may be cut over the ranks of a group, by rows of the weights.
Does not cover: soft-capped logits, second derivatives.
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
    """Log-probability of one token per row under softmax((hidden @ weight.T + bias) / temperature).

    Gradients flow from log-probabilities and entropies to hidden states, weights and bias. With a
    group, the results are the same on every rank, and so must be their gradients; the gradient of
    the hidden states is this rank's part of a sum over the group.

    Args:
        hidden_ND: (N, D) float32, bfloat16, float16 or float64.
        weight_VD: (V, D) of the same dtype.
        token_ids_N: (N,) int64, each in [0, V).
        bias_V: (V,) of the same dtype, finite.
        temperature: of the distribution, above 0.
        entropy: also compute the entropy of each row's distribution, in nats.
        sum_pi_squared: also compute the sum of its squared probabilities, without gradient.
        chunk_elements: most logits of a tile; results do not depend on it beyond rounding.
        group: ranks that hold the rows of the weights, each its own; hidden states and tokens
            are the same on all of them. None: this rank holds all rows.
        first_token: the token that this rank's first row stands for.

    Returns:
        Each (N,) float32, float64 where the inputs are.

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
    """Online softmax over tiles (arXiv:1805.02867); the backward pass redoes each tile."""

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
        # The vocabulary outside: then the float32 sum of the weights' gradient is one tile wide.
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
