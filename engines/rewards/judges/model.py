"""Reward `model`: what the role `reward` said of the answer, before this function was asked."""

from engines.rewards.base import ScoreRequest


def score(sample: ScoreRequest, *, threshold: float = 0.0) -> dict[str, float]:
    """The number of the reward model.

    Args:
        sample: with `model_score`.
        threshold: a larger number counts as a right answer. Of a model trained on pairs only
            differences mean something: choose it by looking at its scores.

    Returns:
        `score`, and `acc` of 1 or 0.

    Raises:
        ValueError: the model did not read the answer.
    """
    if sample.model_score is None:
        raise ValueError("the conversation is longer than rl.reward.model.max_length")
    return {"score": sample.model_score, "acc": float(sample.model_score > threshold)}
