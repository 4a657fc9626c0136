"""Reward `judge`: the number in what a judge wrote of the answer, before this was asked."""

import re

from engines.rewards.base import ScoreRequest

NUMBER = r"(-?\d+(?:\.\d+)?)"


def score(
    sample: ScoreRequest, *, pattern: str = NUMBER, scale: float = 1.0, threshold: float = 0.5
) -> dict[str, float]:
    """The last number that a judge wrote.

    Args:
        sample: with `judgement`.
        pattern: a regular expression whose first group is the number; its last match counts.
        scale: the score is the number times it.
        threshold: a larger score counts as a right answer.

    Returns:
        `score`, and `acc` of 1 or 0.

    Raises:
        ValueError: the judge came to no end, or wrote nothing that the pattern finds.
    """
    if sample.judgement is None:
        raise ValueError(
            "the judge came to no end within rl.reward.judge: max_length, sampling.max_new_tokens"
        )
    found = re.findall(pattern, sample.judgement)
    if not found:
        raise ValueError(f"the judge wrote {sample.judgement!r}, without what pattern finds")
    [last, *_] = found[-1] if isinstance(found[-1], tuple) else (found[-1],)
    value = float(last) * scale
    return {"score": value, "acc": float(value > threshold)}
