"""Reward `length`: shorter completions earn more; see also `rl.algorithm.overlong`."""

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
    """Return 1.0 up to `free_tokens`, 0.0 from `max_tokens` on; ValueError without tokens."""
    if sample.tokens is None:
        raise ValueError("the sample has no tokens; need a completion that was sampled")
    excess = len(sample.tokens.token_ids) - free_tokens
    share = min(1.0, max(0.0, excess / (max_tokens - free_tokens)))
    return 1.0 - share if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
