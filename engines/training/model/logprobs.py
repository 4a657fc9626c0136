"""Log-probabilities of given tokens from logits, without a float32 copy of all logits.

Promises: float32 results whatever the dtype of the logits; the same numbers with and without
gradient; at any moment at most one chunk of rows exists in float32 beside the logits and, in
the backward pass, their gradient in the logits' dtype.
Letters: N predicting positions, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24
"""Elements of a float32 chunk (64 MiB): large enough that small vocabularies need one chunk."""


def token_logprobs(
    logits_NV: Tensor, token_ids_N: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of one token per row under softmax(logits / temperature).

    Args:
        logits_NV: (N, V) float32, bfloat16 or float16.
        token_ids_N: (N,) int64, each in [0, V).
        temperature: of the distribution, above 0.
        entropy: also compute the entropy of each row's distribution, in nats.

    Returns:
        (N,) float32 log-probabilities, and (N,) float32 entropies or None.
    """
    logprobs_N, entropy_N = cast(
        tuple[Tensor, Tensor],
        _TokenLogprobs.apply(logits_NV, token_ids_N, 1.0 / temperature, entropy),
    )
    return logprobs_N, entropy_N if entropy else None


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and one log-sum-exp per row; the backward pass redoes the softmax."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, token_ids_N: Tensor, scale: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        num_rows = logits_NV.shape[0]
        log_sum_N = logits_NV.new_empty(num_rows, dtype=torch.float32)
        logprobs_N = torch.empty_like(log_sum_N)
        entropy_N = log_sum_N.new_zeros(num_rows if entropy else 0)
        for rows in _row_chunks(logits_NV):
            z = _scaled(logits_NV[rows], scale)
            log_sum_N[rows] = torch.logsumexp(z, dim=1)
            chosen = z.gather(1, token_ids_N[rows, None]).squeeze(1)
            logprobs_N[rows] = chosen - log_sum_N[rows]
            if entropy:
                # Not log_sum - sum(p * z): of large logits that loses three digits.
                log_probs = z - log_sum_N[rows, None]
                entropy_N[rows] = -log_probs.exp().mul_(log_probs).sum(dim=1)
        ctx.save_for_backward(logits_NV, token_ids_N, log_sum_N, entropy_N)
        ctx.scale = scale
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, token_ids_N, log_sum_N, entropy_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N = grad_outputs
        grad_NV = torch.empty_like(logits_NV)
        for rows in _row_chunks(logits_NV):
            log_probs = _scaled(logits_NV[rows], ctx.scale) - log_sum_N[rows, None]
            probs = log_probs.exp()
            grad = probs * -grad_logprobs_N[rows, None]
            grad.scatter_add_(1, token_ids_N[rows, None], grad_logprobs_N[rows, None])
            if entropy_N.numel():
                # dH/dz = -p * (log p + H)
                weight = log_probs.add_(entropy_N[rows, None]).mul_(probs)
                grad.sub_(weight.mul_(grad_entropy_N[rows, None]))
            grad_NV[rows] = grad if ctx.scale == 1.0 else grad.mul_(ctx.scale)
        return grad_NV, None, None, None


def _scaled(logits: Tensor, scale: float) -> Tensor:
    logits = logits.float()
    return logits if scale == 1.0 else logits * scale


def _row_chunks(logits_NV: Tensor) -> Iterator[slice]:
    num_rows, vocabulary = logits_NV.shape
    size = max(1, _CHUNK_ELEMENTS // max(1, vocabulary))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
