"""Logprobs of given tokens from logits, and values from a head that computes in float32.

Promises: only one chunk of rows has float32 copies at a time, besides the logits and their
gradient. Values are float32 in any model dtype: advantages are differences of values, and around 9,
bfloat16 values are 0.06 apart, so the difference of two close ones would be rounding noise.
Letters: N predicting positions, V vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engines.training.model.linear_tiles import slices
from engines.types import Readouts

_CHUNK_ELEMENTS = 1 << 24
"""Elements of a float32 chunk (64 MiB): large enough that small vocabularies need one chunk."""


class TokenReadouts(NamedTuple):
    """Logprobs, entropies in nats, and sums of squared probabilities; None if not requested."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    sum_pi_squared_N: Tensor | None

    def read_for(self, asked: Readouts) -> "TokenReadouts":
        """Return the same values; entropies without gradient if none is requested."""
        if self.entropy_N is None or asked.entropy_gradient:
            return self
        return self._replace(entropy_N=self.entropy_N.detach())

    def stacked(self, dim: int = 0) -> Tensor:
        """Stack the outputs that are not None, in this order, along a new dimension."""
        return torch.stack([row for row in self if row is not None], dim=dim)


def token_logprobs(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> TokenReadouts:
    """Return the logprob of one token per row under softmax(logits / temperature), in float32.

    Optionally also the entropies in nats, and the sums of squared probabilities, without gradient.
    """
    logprobs_N, entropy_N, squares_N = cast(
        tuple[Tensor, Tensor, Tensor],
        _TokenLogprobs.apply(logits_NV, token_ids_N, 1.0 / temperature, entropy, sum_pi_squared),
    )
    return TokenReadouts(
        logprobs_N, entropy_N if entropy else None, squares_N if sum_pi_squared else None
    )


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and one log-sum-exp per row; the backward pass recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, token_ids_N: Tensor, scale: float, entropy: bool,
        squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        num_rows = logits_NV.shape[0]
        log_sum_N = logits_NV.new_empty(num_rows, dtype=torch.float32)
        logprobs_N = torch.empty_like(log_sum_N)
        entropy_N = log_sum_N.new_zeros(num_rows if entropy else 0)
        squares_N = log_sum_N.new_zeros(num_rows if squares else 0)
        for rows in _row_chunks(logits_NV):
            z = _scaled(logits_NV[rows], scale)
            log_sum_N[rows] = torch.logsumexp(z, dim=1)
            logprobs_N[rows] = z.gather(1, token_ids_N[rows, None]).squeeze(1) - log_sum_N[rows]
            if entropy:
                # Not log_sum - sum(p * z): for large logits that loses three digits.
                log_probs = z - log_sum_N[rows, None]
                entropy_N[rows] = -log_probs.exp().mul_(log_probs).sum(dim=1)
            if squares:
                squares_N[rows] = (z - log_sum_N[rows, None]).exp().square().sum(dim=1)
        ctx.save_for_backward(logits_NV, token_ids_N, log_sum_N, entropy_N)
        ctx.scale = scale
        ctx.mark_non_differentiable(squares_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, squares_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_NV, token_ids_N, log_sum_N, entropy_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N, _ = grad_outputs
        if grad_logprobs_N is None:  # a loss of the entropy alone
            grad_logprobs_N = torch.zeros_like(log_sum_N)
        grad_NV = torch.empty_like(logits_NV)
        for rows in _row_chunks(logits_NV):
            log_probs = _scaled(logits_NV[rows], ctx.scale) - log_sum_N[rows, None]
            probs = log_probs.exp()
            grad = probs * -grad_logprobs_N[rows, None]
            grad.scatter_add_(1, token_ids_N[rows, None], grad_logprobs_N[rows, None])
            if grad_entropy_N is not None and entropy_N.numel():
                # dH/dz = -p * (log p + H)
                weight = log_probs.add_(entropy_N[rows, None]).mul_(probs)
                grad.sub_(weight.mul_(grad_entropy_N[rows, None]))
            grad_NV[rows] = grad if ctx.scale == 1.0 else grad.mul_(ctx.scale)
        return grad_NV, None, None, None, None


def _scaled(logits: Tensor, scale: float) -> Tensor:
    logits = logits.float()
    return logits if scale == 1.0 else logits * scale


def _row_chunks(logits_NV: Tensor) -> list[slice]:
    num_rows, vocabulary = logits_NV.shape
    return slices(num_rows, max(1, _CHUNK_ELEMENTS // max(1, vocabulary)))


def float32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``hidden @ weight.T + bias`` in float32; gradients have the dtypes of the inputs."""
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def compute_in_float32(head: nn.Linear) -> None:
    """Make a head compute in float32; its parameters keep dtype and device."""
    head.forward = partial(_forward, head)


def _forward(head: nn.Linear, input: Tensor) -> Tensor:
    return float32_linear(input, head.weight, head.bias)
