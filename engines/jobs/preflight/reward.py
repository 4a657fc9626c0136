"""Checks a reward before training: calls a user function once, and looks for the ground truth."""

import json
from collections.abc import Mapping

from engines.config.algorithm import RewardConfig
from engines.config.plugins import comparing_rewards
from engines.data.read.rows import RLRow
from engines.errors import RewardError
from engines.rewards.base import SampledTokens, ScoreRequest, Unscored
from engines.rewards.mixture import OTHERS
from engines.rewards.scorer import RewardScorer
from infra.errors import ConfigError


def look_at_reward(reward: RewardConfig, row: RLRow | None) -> None:
    """Load the reward function and score the truth of `row`; raise ConfigError if it fails."""
    request = perfect_answer(row)
    alone = reward.model_copy(update={"num_workers": 1, "max_unscored_frac": 1.0})
    try:
        with RewardScorer(alone) as scorer:
            [result] = scorer.score([request])
    except RewardError as error:
        raise ConfigError("rl.reward.function", f"{reward.function}: {error}; repair it") from None
    # The request's model scores are made up, so a function that reads them may rightly fail.
    if isinstance(result, Unscored) and row is not None and not reward.models:
        raise ConfigError(
            "rl.reward.function",
            f"{reward.function} {result.reason} for the first row (data_source "
            f"{row.data_source!r}, its ground truth as the answer); need compute_score("
            "data_source, solution_str, ground_truth, extra_info=None) -> a number; repair it",
        )


def look_at_truths(reward: RewardConfig, without: Mapping[str, RLRow | None]) -> None:
    """Refuse a rule that compares answers with a ground truth that rows do not have.

    Args:
        without: first row of each source without ground truth, by configuration path; None if it
            was not read, so that its route is not known.
    """
    for source, row in without.items():
        asked = tuple(reward.components)
        if reward.routes:
            others = reward.routes.get(OTHERS, ())
            asked = reward.routes.get(row.data_source, others) if row else ()
        for path, part in reward.parts.items():
            if reward.components and path.rpartition(".")[2] not in asked:
                continue
            if part.function in comparing_rewards():
                raise ConfigError(
                    f"{path}.function",
                    f"got {part.function}, which compares answers with a ground truth; {source} "
                    "has rows without one; need rows with one, or a model that judges "
                    "(rl.reward.function model or judge); choose one",
                )


def perfect_answer(row: RLRow | None) -> ScoreRequest:
    """Return a request whose answer is the ground truth, with made-up scores of the models."""
    truth = row.reward_model.ground_truth if row else ""
    return ScoreRequest(
        data_source=row.data_source if row else "preflight",
        solution_str=truth if isinstance(truth, str) else json.dumps(truth),
        ground_truth=truth,
        extra_info=row.extra_info if row else {},
        # The text was not sampled: a reward that reads tokens gets one dummy token.
        tokens=SampledTokens((0,), (0,), (0.0,), "stop"),
        model_score=0.0,
        judgement="0",
    )
