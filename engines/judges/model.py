"""Reward `model`: the score that the role `reward` gave before this function is called."""

from engines.rewards.base import ScoreRequest


def score(sample: ScoreRequest, *, threshold: float = 0.0) -> dict[str, float]:
    """Return the reward model's number as `score`, and `acc`, 1 or 0.

    Choose `threshold` from observed scores: those of a model trained on pairs have no fixed zero.

    Raises:
        ValueError: the model did not read the answer.
    """
    if sample.model_score is None:
        raise ValueError("the conversation is longer than rl.reward.model.max_length")
    return {"score": sample.model_score, "acc": float(sample.model_score > threshold)}
