"""Aggregate per-token losses to the loss of an optimizer step.

Promises: a micro-batch yields a sum divided by *global* counts, so the shares add up to the same
value for every distribution of whole sequences over micro-batches and ranks.
Does not include the backend's data-parallel factor; BaseEngine applies it.
"""

import torch
from torch import Tensor

from engines.config.algorithm import LossAggMode
from engines.types import GlobalCounts, TokenBatch


def masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the sum of (T,) values where the mask holds; inf or NaN elsewhere is ignored."""
    return torch.where(mask_T, values_T, 0.0).sum()


def token_mean(values_T: Tensor, mask_T: Tensor, counts: GlobalCounts) -> Tensor:
    """Return this micro-batch's share of the mean over all trained tokens of the step."""
    return masked_sum(values_T, mask_T) / max(counts.num_tokens, 1)


def aggregate(
    values_T: Tensor,
    mask_T: Tensor,
    batch: TokenBatch,
    counts: GlobalCounts,
    mode: LossAggMode,
    scale_factor: float,
) -> Tensor:
    """Return this micro-batch's share of the step's loss, a scalar; 0 without trained tokens.

    With l_t the loss of a trained token, N such tokens and S sequences with one in the step:

    - `token-mean`: sum of l_t / N (DAPO, arXiv:2503.14476 eq. 12).
    - `token-sum`: sum of l_t.
    - `seq-mean-token-sum`: sum of l_t / S.
    - `seq-mean-token-mean`: the mean over sequences of each one's mean (GRPO, arXiv:2402.03300).
    - `seq-mean-token-sum-norm`: sum of l_t / (S * scale_factor) (Dr. GRPO, arXiv:2503.20783).
    """
    num_sequences = max(counts.num_sequences, 1)
    divisors = {
        "token-mean": max(counts.num_tokens, 1),
        "token-sum": 1,
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-sum-norm": num_sequences * scale_factor,
    }
    if mode in divisors:
        return masked_sum(values_T, mask_T) / divisors[mode]
    index_T, ones_T = batch.sequence_index_T, mask_T.to(torch.float32)
    count_B = torch.zeros(batch.num_sequences, device=mask_T.device).index_add(0, index_T, ones_T)
    return masked_sum(values_T / count_B.clamp(min=1)[index_T], mask_T) / num_sequences
