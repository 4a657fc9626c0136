"""Reward `format`: 1 if a completion has the required form, else 0, independent of its content.

Reward `length`: shorter completions earn more; see also `rl.algorithm.overlong`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engines.rewards.base import ScoreRequest

THINK_THEN_ANSWER = ("think", "answer")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    tags: Sequence[str] = THINK_THEN_ANSWER,
    pattern: str | None = None,
) -> float:
    """Return 1.0 if the completion has the form of `FormatOptions`, else 0.0."""
    del data_source, ground_truth, extra_info
    text = solution_str.strip()
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
    for tag in tags:
        content, closed, rest = text.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not (text.startswith(f"<{tag}>") and closed and content.strip()):
            return 0.0
        text = rest.lstrip()
    return float(not text)


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
