"""Turn completions into scored samples: text, reward function, shaping.

Promises: a completion that was aborted or could not be scored is counted and left out; shaping (the
overlong penalty) changes `reward`, not `score`. Scoring during generation gives the same result as
scoring after it, in any order, because a reward is a function of one sample.

Scored samples for the RL loop; separate from it, so that scoring imports no algorithm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from engines.algorithms.reward_shaping import overlong_penalty
from engines.config.algorithm import OverlongConfig
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.judges.asking import NO_JUDGES, Judges
from engines.rewards.base import SampledTokens, Score, ScoreRequest
from engines.rewards.scorer import RewardScorer, ScoringBatch
from engines.trainers.prompts import PromptBatch
from engines.trainers.step_timer import errors_in
from engines.trajectory import Prompt, Trajectory
from engines.types import Completion, RolloutRequest


@dataclass(frozen=True)
class ScoredSample:
    """One trajectory with its score; `group` is the index of its prompt within the RL step.

    Advantages use `reward`: the score plus shaping (overlong penalty). `extras` has other values of
    the reward function; `greedy_reward` is for estimators that read it.
    """

    group: int
    trajectory: Trajectory
    score: float
    reward: float
    extras: Mapping[str, float] = field(default_factory=dict)
    correct: bool = False
    greedy_reward: float | None = None


@dataclass(frozen=True)
class ScoredBatch:
    """The scored samples of one generation batch, and counts of its completions.

    Aborted completions are not scored, and not counted in `num_unscored`.
    """

    samples: tuple[ScoredSample, ...]
    num_generated: int
    num_unscored: int
    num_aborted: int


NO_SHAPING = OverlongConfig()

Completions = Sequence[Sequence[Completion]]
"""By request."""
Scores = list[list[Score | None]]
"""In the layout of `Completions`; None for a completion without a score."""
Place = tuple[int, int]
"""Index of a request, and of the completion within it."""


class CompletionScorer:
    """Scores completions; judges are asked before the reward function is called.

    `overlong` penalizes long answers relative to `max_new_tokens`; evaluation has no penalty.
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
        """Return the text of a completion, without special tokens."""
        return self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)

    def judge(
        self,
        rows: Sequence[RLRow],
        completions: Completions,
        requests: Sequence[RolloutRequest],
    ) -> Scores:
        """Score the completions of each prompt, given one row and one request per prompt.

        Raises `RewardError` if the reward function is broken, or left too many samples unscored.
        """
        batch = self._rewards.batch()
        with ArrivingScores(rows, requests, batch, self.decode, self._judges) as arriving:
            return arriving.scores(completions)

    def score(self, prompts: PromptBatch, completions: Completions) -> ScoredBatch:
        """Score the completions of one generation batch: of its requests, then of its greedy ones.

        Samples without a score, or whose greedy answer has none, are left out. Errors as in
        `judge`.
        """
        with self.begin(prompts) as scoring:
            return scoring.finish(completions)

    def begin(self, prompts: PromptBatch) -> "BatchScoring":
        """Return a context that scores a batch while it is sampled; contexts must not overlap."""
        batch = self._rewards.batch()
        return BatchScoring(prompts, batch, self.decode, self._judges, self._scored)

    def _scored(
        self, prompts: PromptBatch, completions: Completions, scores: Scores
    ) -> ScoredBatch:
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

    def _reward(self, completion: Completion, score: Score | None) -> float | None:
        return None if score is None else score.value + self._shaping(completion)

    def _shaping(self, completion: Completion) -> float:
        if not self._overlong.enable:
            return 0.0
        length = torch.tensor([len(completion.token_ids)])
        return float(overlong_penalty(length, self._max_new_tokens, self._overlong))


class ArrivingScores:
    """Scores completions as they arrive; a context manager for one thread.

    If there are judges, only decoding is done early: they get all completions in one call.
    """

    def __init__(
        self,
        rows: Sequence[RLRow],
        requests: Sequence[RolloutRequest],
        batch: ScoringBatch,
        decode: Callable[[Completion], str],
        judges: Judges,
    ) -> None:
        self._rows, self._requests = rows, requests
        self._batch, self._decode, self._judges = batch, decode, judges
        self._places: dict[tuple[str, int], Place] = {
            key: (row, sample)
            for row, request in enumerate(requests)
            for sample, key in enumerate(request.sample_keys)
        }
        self._taken: dict[Place, tuple[Completion, ScoreRequest]] = {}

    def accept(self, completion: Completion) -> None:
        """Accept a completion before the others are complete; an aborted one is ignored."""
        if completion.finish_reason != "abort":
            place = self._places[completion.request_id, completion.sample_index]
            with errors_in("reward"):
                self._take(place, completion)

    def scores(self, completions: Completions) -> Scores:
        """Score all completions, those not accepted too; errors as in `CompletionScorer.judge`."""
        places: list[Place] = []
        for row, samples in enumerate(completions):
            for sample, completion in enumerate(samples):
                place = (row, sample)
                if completion.finish_reason == "abort":
                    continue
                if place not in self._taken or self._taken[place][0] is not completion:
                    self._take(place, completion)
                places.append(place)
        if self._judges != NO_JUDGES:
            asked = [self._taken[place][1] for place in places]
            told = self._judges.ask([self._rows[row].prompt for row, _ in places], asked)
            for place, sample in zip(places, told, strict=True):
                self._batch.add(place, sample)
        scores: Scores = [[None] * len(samples) for samples in completions]
        for (row, sample), result in zip(places, self._batch.results(places), strict=True):
            scores[row][sample] = result if isinstance(result, Score) else None
        return scores

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._batch.close()

    def _take(self, place: Place, completion: Completion) -> None:
        row, asked = self._rows[place[0]], self._requests[place[0]]
        sample = ScoreRequest(
            data_source=row.data_source,
            solution_str=self._decode(completion),
            ground_truth=row.reward_model.ground_truth,
            extra_info=row.extra_info,
            tokens=SampledTokens(
                asked.prompt_ids,
                completion.token_ids,
                completion.logprobs,
                completion.finish_reason,
            ),
        )
        self._taken[place] = (completion, sample)
        if self._judges == NO_JUDGES:
            self._batch.add(place, sample)


class BatchScoring(ArrivingScores):
    """One generation batch that is scored while it is generated.

    with scorer.begin(prompts) as scoring:
        completions = rollout.generate(prompts.all_requests, scoring.accept)
        scored = scoring.finish(completions)
    """

    def __init__(
        self,
        prompts: PromptBatch,
        batch: ScoringBatch,
        decode: Callable[[Completion], str],
        judges: Judges,
        scored: Callable[[PromptBatch, Completions, Scores], ScoredBatch],
    ) -> None:
        super().__init__(prompts.asked_rows, prompts.all_requests, batch, decode, judges)
        self._prompts, self._scored = prompts, scored

    def finish(self, completions: Completions) -> ScoredBatch:
        """Return the scored batch as `CompletionScorer.score` does; score what was not accepted."""
        return self._scored(self._prompts, completions, self.scores(completions))


def is_correct(score: Score) -> bool:
    """Return True if a score counts as a right answer.

    The verdict `acc` decides if there is one; else a score of at least 1, which every shipped
    reward gives only to a right answer.
    """
    return score.extras["acc"] >= 0.5 if "acc" in score.extras else score.value >= 1.0
