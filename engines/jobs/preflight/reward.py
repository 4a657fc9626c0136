"""A reward before anything trains: one of the user's is called once, a rule has what it reads."""

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
    """Load the reward function and call it once.

    Args:
        reward: of the recipe.
        row: judged with its own ground truth as the answer; None only loads the function.

    Raises:
        ConfigError: it cannot be loaded; or no model judges, and it raises or misses its deadline.
    """
    request = perfect_answer(row)
    alone = reward.model_copy(update={"num_workers": 1, "max_unscored_frac": 1.0})
    try:
        with RewardScorer(alone) as scorer:
            [result] = scorer.score([request])
    except RewardError as error:
        raise ConfigError("rl.reward.function", f"{reward.function}: {error}; repair it") from None
    # What a model would say was invented, and a function may rightly find nothing in it.
    if isinstance(result, Unscored) and row is not None and not reward.models:
        raise ConfigError(
            "rl.reward.function",
            f"{reward.function} {result.reason} for the first row (data_source "
            f"{row.data_source!r}, its ground truth as the answer); need compute_score("
            "data_source, solution_str, ground_truth, extra_info=None) -> a number; repair it",
        )


def look_at_truths(reward: RewardConfig, without: Mapping[str, RLRow | None]) -> None:
    """Refuse a rule that compares answers with a ground truth which rows do not have.

    Args:
        reward: that judges answers to the rows.
        without: by the place of a source without one, its first row; None: nobody read one, and
            where there are routes, nobody knows which one it has.

    Raises:
        ConfigError: names the function.
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
    """The ground truth as the answer, of which every model said something."""
    truth = row.reward_model.ground_truth if row else ""
    return ScoreRequest(
        data_source=row.data_source if row else "preflight",
        solution_str=truth if isinstance(truth, str) else json.dumps(truth),
        ground_truth=truth,
        extra_info=row.extra_info if row else {},
        # Its text was not sampled; a reward that reads tokens sees one of each.
        tokens=SampledTokens((0,), (0,), (0.0,), "stop"),
        model_score=0.0,
        judgement="0",
    )
