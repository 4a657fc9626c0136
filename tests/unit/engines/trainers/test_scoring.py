"""Completions to scored samples: shaping beside the score, unscored and aborted left out."""

import pytest

from engines.config.algorithm import OverlongConfig, RewardConfig
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.errors import RewardError
from engines.rewards.scorer import RewardScorer
from engines.trainers.samples.prompts import PromptBatch
from engines.trainers.samples.scoring import CompletionScorer
from engines.types import Completion, RolloutRequest, SamplingParams


class Digits:
    """Token i is the digit i."""

    def decode(self, token_ids, *, skip_special_tokens: bool = False) -> str:
        return "".join(str(token) for token in token_ids)


def prompt_batch(*truths) -> PromptBatch:
    rows = tuple(
        RLRow("s", (Message("user", "q"),), "", RewardModel("rule", truth)) for truth in truths
    )
    requests = tuple(
        RolloutRequest(f"p{i}", (5, 6), SamplingParams(8), (1, 2)) for i in range(len(truths))
    )
    return PromptBatch(4, rows, requests)


def completion(*tokens: int, reason: str = "stop") -> Completion:
    zeros = (0,) * len(tokens)
    return Completion("p", 0, tokens, zeros, zeros, reason)


def scorer(rewards: RewardScorer, **overlong) -> CompletionScorer:
    return CompletionScorer(rewards, Digits(), OverlongConfig(**overlong), 8)  # pyright: ignore[reportArgumentType]


def test_groups_scores_and_counts() -> None:
    with RewardScorer(RewardConfig(function="exact", max_unscored_frac=0.5)) as rewards:
        batch = scorer(rewards).score(
            # A ground truth that is an object cannot be compared: unscored, not 0.
            prompt_batch("12", {"not": "comparable"}),
            [[completion(1, 2), completion(1, 3)], [completion(1), completion(9, reason="abort")]],
        )
    assert [(s.group, s.score, s.reward) for s in batch.samples] == [(4, 1, 1), (4, 0, 0)]
    assert batch.samples[0].trajectory.prompt.token_ids_P.tolist() == [5, 6]
    assert (batch.num_generated, batch.num_unscored, batch.num_aborted) == (4, 1, 1)


def test_the_overlong_punishment_changes_the_reward_and_not_the_score() -> None:
    """Limit 8, buffer 4: 6 tokens are 2 into the buffer, -2/4 x factor 1."""
    with RewardScorer(RewardConfig(function="exact")) as rewards:
        punish = scorer(rewards, enable=True, buffer_length=4, penalty_factor=1.0)
        batch = punish.score(prompt_batch("111111"), [[completion(*[1] * 6), completion(*[1] * 4)]])
    assert [(s.score, s.reward) for s in batch.samples] == [(1.0, 0.5), (0.0, 0.0)]


def test_too_many_unscored_samples_stop_the_run() -> None:
    with (
        RewardScorer(RewardConfig(function="exact")) as rewards,
        pytest.raises(RewardError, match="could not be scored"),
    ):
        scorer(rewards).score(prompt_batch({"no": "text"}), [[completion(1), completion(2)]])
