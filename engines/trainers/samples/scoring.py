"""From completions to scored samples: text, reward function, shaping.

Promises: a completion that was aborted or could not be scored is counted and left out; the score
stays what the reward function said, and shaping (the overlong punishment) is added beside it. A
batch that is scored during generation has the same result as one that is scored after it, in
whatever order its samples finish. A reward is a function of one sample; none waits for the rest of
its group.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch

from engines.algorithms.overlong import overlong_penalty
from engines.config.algorithm import OverlongConfig
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.rewards.base import SampledTokens, Score, ScoreRequest
from engines.rewards.scorer import RewardScorer, ScoringBatch
from engines.trainers.judges.asking import NO_JUDGES, Judges
from engines.trainers.loop.phases import errors_in
from engines.trainers.samples.prompts import PromptBatch
from engines.trainers.samples.scored import ScoredBatch, ScoredSample
from engines.trajectory import Prompt, Trajectory
from engines.types import Completion, RolloutRequest

NO_SHAPING = OverlongConfig()

Completions = Sequence[Sequence[Completion]]
"""Of each request."""
Scores = list[list[Score | None]]
"""Of `Completions`, in their layout; None where there is none."""
Place = tuple[int, int]
"""A request's, and of the completion among its own."""


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
        completions: Completions,
        requests: Sequence[RolloutRequest],
    ) -> Scores:
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
        batch = self._rewards.batch()
        with ArrivingScores(rows, requests, batch, self.decode, self._judges) as arriving:
            return arriving.scores(completions)

    def score(self, prompts: PromptBatch, completions: Completions) -> ScoredBatch:
        """Score the completions of one generation batch.

        Args:
            prompts: what was asked for.
            completions: of each of its requests, then of each of its greedy ones.

        Returns:
            The samples that have a score and, where there are greedy answers, a scored one.

        Raises:
            RewardError: as of `judge`.
        """
        with self.begin(prompts) as scoring:
            return scoring.finish(completions)

    def begin(self, prompts: PromptBatch) -> "BatchScoring":
        """Begin to score a generation batch whose completions come one by one.

        Args:
            prompts: what is asked for.

        Returns:
            A context manager; it must end before the next one begins.
        """
        batch = self._rewards.batch()
        return BatchScoring(prompts, batch, self.decode, self._judges, self._scored)

    def _scored(
        self, prompts: PromptBatch, completions: Completions, scores: Scores
    ) -> ScoredBatch:
        """What became of a generation batch whose completions have these scores."""
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
    """Scores of completions that may come one by one; a context manager, for one thread.

    Each completion is decoded once. Where models judge, only that is done early: they are asked
    about all completions at once, before the reward function is.

    Args:
        rows: one per request.
        requests: that ask for the completions.
        batch: of the reward function.
        decode: gives the text of a completion.
        judges: models that are asked first.
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
        """Take a completion before the others are there; one that was aborted is ignored."""
        if completion.finish_reason != "abort":
            place = self._places[completion.request_id, completion.sample_index]
            with errors_in("reward"):
                self._take(place, completion)

    def scores(self, completions: Completions) -> Scores:
        """Score what was not accepted, wait for all of it, and end.

        Args:
            completions: of each request, those that were accepted too.

        Returns:
            In the same layout; None where there is no score.

        Raises:
            RewardError: as of `CompletionScorer.judge`.
        """
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

    Args:
        prompts: what is asked for.
        batch: as in `ArrivingScores`.
        decode: likewise.
        judges: likewise.
        scored: makes the scored batch.
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
        """What `CompletionScorer.score` gives; those that were never accepted are scored now."""
        return self._scored(self._prompts, completions, self.scores(completions))


def is_correct(score: Score) -> bool:
    """Whether a score counts as a right answer.

    The reward function's own verdict `acc` decides where it gives one; else a score of 1 or
    more, which every shipped reward gives to a right answer and to nothing else.
    """
    return score.extras["acc"] >= 0.5 if "acc" in score.extras else score.value >= 1.0
