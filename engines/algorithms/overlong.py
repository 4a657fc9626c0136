"""Soft overlong punishment: long answers lose score before they are cut off."""

import torch
from torch import Tensor

from engines.config.algorithm import OverlongConfig


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, overlong: OverlongConfig) -> Tensor:
    """What to add to each score: 0, falling linearly to `-penalty_factor` at the limit.

    DAPO, arXiv:2503.14476 eq. 13: with the buffer b and the limit L,
    ``min(0, -(length - (L - b)) / b * penalty_factor)``.

    Args:
        lengths_B: (B,) tokens of each response, end token included.
        max_new_tokens: the limit L.
        overlong: buffer, factor and switch.

    Returns:
        (B,) float32, never positive; all 0 when it is switched off.
    """
    if not overlong.enable:
        return torch.zeros(lengths_B.shape, dtype=torch.float32, device=lengths_B.device)
    excess_B = lengths_B.to(torch.float32) - (max_new_tokens - overlong.buffer_length)
    return (-excess_B / overlong.buffer_length * overlong.penalty_factor).clamp(max=0.0)
