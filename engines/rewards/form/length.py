"""Reward `length`: shorter completions earn more; by tokens, so it sees the whole sample.

Promises: 1 up to `free_tokens`, 0 from `max_tokens` on, falling between them by a line or half a
cosine. Shaping of long answers before they are cut off is `rl.algorithm.overlong`, beside any
reward.
"""

import math
from typing import Literal

from engines.rewards.base import ScoreRequest


def score(
    sample: ScoreRequest,
    *,
    max_tokens: int,
    free_tokens: int = 0,
    shape: Literal["linear", "cosine"] = "linear",
) -> float:
    """Judge the length of a completion.

    Args:
        sample: with its tokens.
        max_tokens: from here on it earns 0.
        free_tokens: up to here it earns 1; less than `max_tokens`.
        shape: how it falls between them.

    Returns:
        From 0.0 to 1.0.

    Raises:
        ValueError: the sample has no tokens.
    """
    if sample.tokens is None:
        raise ValueError("the sample has no tokens; need a completion that was sampled")
    excess = len(sample.tokens.token_ids) - free_tokens
    share = min(1.0, max(0.0, excess / (max_tokens - free_tokens)))
    return 1.0 - share if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
