"""Turn completions into scored samples: text, reward function, shaping.

Promises: a completion that was aborted or could not be scored is counted and left out; shaping (the
overlong penalty) changes `reward`, not `score`. Scoring during generation gives the same result as
scoring after it, in any order, because a reward is a function of one sample.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from engines.config.algorithm import OverlongConfig
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.judges.asking import NO_JUDGES, Judges
from engines.rewards.base import SampledTokens, Score, ScoreRequest, is_correct
from engines.rewards.scorer import RewardScorer, ScoringBatch
from engines.trainers.prompts import PromptBatch
from engines.trainers.step_timer import errors_in
from engines.trajectory import Prompt, Trajectory
from engines.types import Completion, RolloutRequest


@dataclass(frozen=True)
class ScoredSample:
    """One trajectory with its score; `group` is the index of its prompt within the RL step.

    Advantages use `reward`: the score plus shaping (overlong penalty). `extras` has other values of
    the reward function; `greedy_reward` is that of the prompt's greedy answer, None if not sampled.
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
"""Completions by request, those of a request in the order of its seeds."""
Scores = list[list[Score | None]]
"""Scores in the layout of `Completions`; None for a completion without a score."""
Place = tuple[int, int]
"""Index of a request, and of the completion within it."""


@dataclass(frozen=True)
class CompletionScorer:
    """Scores completions; judges run first, and the reward function reads their results.

    `overlong` penalizes long answers relative to `max_new_tokens`; evaluation has no penalty.
    """

    rewards: RewardScorer
    tokenizer: ChatTokenizer
    overlong: OverlongConfig = NO_SHAPING
    max_new_tokens: int = 1
    judges: Judges = NO_JUDGES

    def decode(self, completion: Completion) -> str:
        """Return the text of a completion, without special tokens."""
        return self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)

    @contextmanager
    def begin(
        self, rows: Sequence[RLRow], requests: Sequence[RolloutRequest]
    ) -> Iterator["BatchScoring"]:
        """Score a batch, of one row per request, while it is sampled; contexts must not overlap."""
        with self.rewards.batch() as batch:
            yield BatchScoring(rows, requests, batch, self.decode, self.judges)

    def judge(
        self, rows: Sequence[RLRow], completions: Completions, requests: Sequence[RolloutRequest]
    ) -> Scores:
        """Score the completions of each prompt, given one row and one request per prompt.

        Raises `RewardError` if the reward function is broken, or left too many samples unscored.
        """
        with self.begin(rows, requests) as scoring:
            return scoring.scores(completions)

    def samples(
        self, prompts: PromptBatch, completions: Completions, scores: Scores
    ) -> ScoredBatch:
        """Return a batch's scored samples; `completions` and `scores` are of its `all_requests`.

        Samples without a score, or whose greedy answer has none, are left out.
        """
        num_prompts = len(prompts.requests)
        samples: list[ScoredSample] = []
        for place, request in enumerate(prompts.requests):
            baseline = None
            if prompts.greedy_requests:
                [greedy], [score] = completions[num_prompts + place], scores[num_prompts + place]
                if score is None:
                    continue
                baseline = score.value + self._shaping([greedy])[0]
            prompt, row = Prompt.of(request), completions[place]
            samples += [
                ScoredSample(
                    group=prompts.first_group + place,
                    trajectory=Trajectory.of(prompt, completion),
                    score=score.value,
                    reward=score.value + shaping,
                    extras=score.extras,
                    correct=is_correct(score),
                    greedy_reward=baseline,
                )
                for completion, score, shaping in zip(
                    row, scores[place], self._shaping(row), strict=True
                )
                if score is not None
            ]
        everything = list(chain.from_iterable(completions[:num_prompts]))
        num_aborted = sum(completion.finish_reason == "abort" for completion in everything)
        return ScoredBatch(
            tuple(samples),
            num_generated=len(everything),
            num_unscored=len(everything) - num_aborted - len(samples),
            num_aborted=num_aborted,
        )

    def _shaping(self, completions: Sequence[Completion]) -> list[float]:
        lengths = torch.tensor([len(completion.token_ids) for completion in completions])
        return overlong_penalty(lengths, self.max_new_tokens, self.overlong).tolist()


class BatchScoring:
    """Scores one generation batch as its completions arrive; for one thread.

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
            with errors_in("reward"):
                self._take(self._places[completion.request_id, completion.sample_index], completion)

    def scores(self, completions: Completions) -> Scores:
        """Score all completions, those not accepted too; errors as in `CompletionScorer.judge`."""
        finished = {
            (row, sample): completion
            for row, samples in enumerate(completions)
            for sample, completion in enumerate(samples)
            if completion.finish_reason != "abort"
        }
        places = list(finished)
        for place, completion in finished.items():
            if place not in self._taken or self._taken[place][0] is not completion:
                self._take(place, completion)
        if self._judges != NO_JUDGES:
            asked = [self._taken[place][1] for place in places]
            told = self._judges.ask([self._rows[row].prompt for row, _ in places], asked)
            for place, sample in zip(places, told, strict=True):
                self._batch.add(place, sample)
        scores: Scores = [[None] * len(samples) for samples in completions]
        for (row, sample), result in zip(places, self._batch.results(places), strict=True):
            scores[row][sample] = result if isinstance(result, Score) else None
        return scores

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


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, overlong: OverlongConfig) -> Tensor:
    """Return (B,) float32 to add to the scores: 0, falling to `-penalty_factor` at the limit.

    DAPO, arXiv:2503.14476 eq. 13: with the buffer b, the limit L = `max_new_tokens` and the length
    with end token, ``min(0, -(length - (L - b)) / b * penalty_factor)``. All 0 if switched off.
    """
    if not overlong.enable:
        return torch.zeros(lengths_B.shape, dtype=torch.float32, device=lengths_B.device)
    excess_B = lengths_B.to(torch.float32) - (max_new_tokens - overlong.buffer_length)
    return (-excess_B / overlong.buffer_length * overlong.penalty_factor).clamp(max=0.0)
