"""Soft overlong punishment: long answers lose score before they are cut off."""

import torch
from torch import Tensor

from engines.config.algorithm import OverlongConfig


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, overlong: OverlongConfig) -> Tensor:
    """Return (B,) float32 to add to the scores: 0, falling to `-penalty_factor` at the limit.

    DAPO, arXiv:2503.14476 eq. 13: with the buffer b, the limit L = `max_new_tokens` and the length
    with end token, ``min(0, -(length - (L - b)) / b * penalty_factor)``. All 0 if switched off.
    """
    if not overlong.enable:
        return torch.zeros(lengths_B.shape, dtype=torch.float32, device=lengths_B.device)
    excess_B = lengths_B.to(torch.float32) - (max_new_tokens - overlong.buffer_length)
    return (-excess_B / overlong.buffer_length * overlong.penalty_factor).clamp(max=0.0)
