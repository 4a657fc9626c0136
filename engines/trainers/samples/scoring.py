"""From completions to scored samples: text, reward function, shaping.

Promises: a completion that was aborted or could not be scored is counted and left out; the score
stays what the reward function said, and shaping (the overlong punishment) is added beside it.
"""

from collections.abc import Sequence

import torch

from engines.algorithms.overlong import overlong_penalty
from engines.config.algorithm import OverlongConfig
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.rewards.base import SampledTokens, Score, ScoreRequest
from engines.rewards.scorer import RewardScorer
from engines.trainers.judges.asking import NO_JUDGES, Judges
from engines.trainers.samples.prompts import PromptBatch
from engines.trainers.samples.scored import ScoredBatch, ScoredSample
from engines.trajectory import Prompt, Trajectory
from engines.types import Completion, RolloutRequest

NO_SHAPING = OverlongConfig()


class CompletionScorer:
    """Judges completions: their text, and for rewards that ask what was sampled.

    Args:
        rewards: the configured reward function.
        tokenizer: of the policy.
        overlong: punishment of long answers; evaluation has none.
        max_new_tokens: length limit that the punishment refers to.
        judges: models that are asked about every answer before the reward function is.
    """

    def __init__(
        self,
        rewards: RewardScorer,
        tokenizer: ChatTokenizer,
        overlong: OverlongConfig = NO_SHAPING,
        max_new_tokens: int = 1,
        judges: Judges = NO_JUDGES,
    ) -> None:
        self._rewards = rewards
        self.tokenizer = tokenizer
        self._overlong = overlong
        self._max_new_tokens = max_new_tokens
        self._judges = judges

    def decode(self, completion: Completion) -> str:
        """Text of a completion, without special tokens."""
        return self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)

    def judge(
        self,
        rows: Sequence[RLRow],
        completions: Sequence[Sequence[Completion]],
        requests: Sequence[RolloutRequest],
    ) -> list[list[Score | None]]:
        """Score every completion.

        Args:
            rows: one per prompt.
            completions: of each prompt.
            requests: that asked for them.

        Returns:
            In the same layout; None where there is no score.

        Raises:
            RewardError: the reward function is broken, or left too many samples unscored.
        """
        places = [
            (row, sample)
            for row, samples in enumerate(completions)
            for sample, completion in enumerate(samples)
            if completion.finish_reason != "abort"
        ]
        samples = [
            self._request(rows[row], completions[row][sample], requests[row])
            for row, sample in places
        ]
        samples = self._judges.ask([rows[row].prompt for row, _ in places], samples)
        scores: list[list[Score | None]] = [[None] * len(samples) for samples in completions]
        for (row, sample), result in zip(places, self._rewards.score(samples), strict=True):
            scores[row][sample] = result if isinstance(result, Score) else None
        return scores

    def score(
        self, prompts: PromptBatch, completions: Sequence[Sequence[Completion]]
    ) -> ScoredBatch:
        """Score the completions of one generation batch.

        Args:
            prompts: what was asked for.
            completions: of each of its requests, then of each of its greedy ones.

        Returns:
            The samples that have a score and, where there are greedy answers, a scored one.
        """
        scores = self.judge(prompts.asked_rows, completions, prompts.all_requests)
        num_prompts = len(prompts.requests)
        greedy = [
            self._reward(row[0], of_row[0])
            for row, of_row in zip(completions[num_prompts:], scores[num_prompts:], strict=True)
        ]
        samples: list[ScoredSample] = []
        for place, request in enumerate(prompts.requests):
            baseline = greedy[place] if greedy else None
            if greedy and baseline is None:
                continue
            prompt = Prompt.of(request)
            for completion, score in zip(completions[place], scores[place], strict=True):
                if score is not None:
                    samples.append(
                        ScoredSample(
                            group=prompts.first_group + place,
                            trajectory=Trajectory.of(prompt, completion),
                            score=score.value,
                            reward=score.value + self._shaping(completion),
                            extras=score.extras,
                            correct=is_correct(score),
                            greedy_reward=baseline,
                        )
                    )
        everything = [completion for row in completions[:num_prompts] for completion in row]
        num_aborted = sum(completion.finish_reason == "abort" for completion in everything)
        return ScoredBatch(
            tuple(samples),
            num_generated=len(everything),
            num_unscored=len(everything) - num_aborted - len(samples),
            num_aborted=num_aborted,
        )

    def _request(self, row: RLRow, completion: Completion, asked: RolloutRequest) -> ScoreRequest:
        return ScoreRequest(
            data_source=row.data_source,
            solution_str=self.decode(completion),
            ground_truth=row.reward_model.ground_truth,
            extra_info=row.extra_info,
            tokens=SampledTokens(
                asked.prompt_ids,
                completion.token_ids,
                completion.logprobs,
                completion.finish_reason,
            ),
        )

    def _reward(self, completion: Completion, score: Score | None) -> float | None:
        return None if score is None else score.value + self._shaping(completion)

    def _shaping(self, completion: Completion) -> float:
        if not self._overlong.enable:
            return 0.0
        length = torch.tensor([len(completion.token_ids)])
        return float(overlong_penalty(length, self._max_new_tokens, self._overlong))


def is_correct(score: Score) -> bool:
    """Whether a score counts as a right answer.

    The reward function's own verdict `acc` decides where it gives one; else a score of 1 or
    more, which every shipped reward gives to a right answer and to nothing else.
    """
    return score.extras["acc"] >= 0.5 if "acc" in score.extras else score.value >= 1.0
