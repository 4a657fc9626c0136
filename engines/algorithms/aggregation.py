"""From the loss of each token to the loss of an optimizer step.

Promises: a micro-batch yields a sum divided by *global* counts, so the shares add up to the same
value however the sequences were spread over micro-batches and ranks. A sequence is never split.
Does not promise the backend's data-parallel factor; BaseEngine applies it.
"""

import torch
from torch import Tensor

from engines.config.algorithm import LossAggMode
from engines.types import GlobalCounts, TokenBatch


def masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Scalar sum of `values_T` (T,) where `mask_T` (T,) holds; inf or NaN elsewhere is harmless."""
    return torch.where(mask_T, values_T, 0.0).sum()


def token_mean(values_T: Tensor, mask_T: Tensor, counts: GlobalCounts) -> Tensor:
    """This micro-batch's share of the mean over all trained tokens of the step."""
    return masked_sum(values_T, mask_T) / max(counts.num_tokens, 1)


def aggregate(
    values_T: Tensor,
    mask_T: Tensor,
    batch: TokenBatch,
    counts: GlobalCounts,
    mode: LossAggMode,
    scale_factor: float,
) -> Tensor:
    """This micro-batch's share of the step's loss.

    With l_t the loss of a trained token, N the trained tokens and S the sequences of the step:

    - `token-mean`: sum of l_t / N (DAPO, arXiv:2503.14476 eq. 12).
    - `token-sum`: sum of l_t.
    - `seq-mean-token-sum`: sum of l_t / S.
    - `seq-mean-token-mean`: the mean over sequences of each one's mean (GRPO, arXiv:2402.03300).
    - `seq-mean-token-sum-norm`: sum of l_t / (S * scale_factor) (Dr. GRPO, arXiv:2503.20783).

    Args:
        values_T: (T,) loss of each token.
        mask_T: (T,) bool, tokens that count.
        batch: the micro-batch, for its sequence bounds.
        counts: denominators over all micro-batches and ranks.
        mode: one of the five names above.
        scale_factor: constant divisor of `seq-mean-token-sum-norm`, else unused.

    Returns:
        Scalar. A step without trained tokens gives 0.
    """
    num_sequences = max(counts.num_sequences, 1)
    if mode == "token-mean":
        return token_mean(values_T, mask_T, counts)
    if mode == "token-sum":
        return masked_sum(values_T, mask_T)
    if mode == "seq-mean-token-sum":
        return masked_sum(values_T, mask_T) / num_sequences
    if mode == "seq-mean-token-sum-norm":
        return masked_sum(values_T, mask_T) / (num_sequences * scale_factor)
    return masked_sum(values_T / tokens_per_sequence_T(mask_T, batch), mask_T) / num_sequences


def tokens_per_sequence_T(mask_T: Tensor, batch: TokenBatch) -> Tensor:
    """(T,) float32: for each token, the number of trained tokens of its sequence, at least 1."""
    index_T = batch.sequence_index_T
    count_B = torch.zeros(batch.num_sequences, device=mask_T.device).index_add(
        0, index_T, mask_T.to(torch.float32)
    )
    return count_B.clamp(min=1)[index_T]
