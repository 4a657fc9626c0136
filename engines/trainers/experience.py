"""The samples of an RL step: collected group by group, packed, given advantages, split in batches.

Promises: unscored and aborted samples, and with dynamic sampling uninformative groups, are left out
and counted, never scored 0. Samples keep the order of their prompts. Too many aborted samples are
an error: without the longest answers the policy would learn to be short.
Letters: B samples, K of them kept, T tokens, G groups (prompts), R reward components.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from engines.algorithms.advantage import SCORE, advantages
from engines.algorithms.kl import reward_kl
from engines.algorithms.sequences import group_statistics, on_last_token
from engines.config.algorithm import AlgorithmConfig, FilterGroupsConfig
from engines.config.base import StrictModel
from engines.config.rules.models import KEYS
from engines.errors import RewardError, RolloutError
from engines.trainers.packing import See, pack, segment_rewards_T, viewed
from engines.trainers.prompts import GREEDY_SCORES
from engines.trainers.scoring import ScoredBatch, ScoredSample
from engines.types import Completion, TokenBatch

KL_IN_REWARD = "actor/reward_kl_penalty"
MIN_SHARED_TOKENS = 1 << 20  # below, views take more time than their 8 bytes a token are worth

Place = Callable[[TokenBatch], TokenBatch]


def as_it_is(batch: TokenBatch) -> TokenBatch:
    """Return the batch itself: the `Place` of a single process."""
    return batch


@dataclass(frozen=True)
class Experience:
    """The samples of one RL step, groups together, and their packed tokens.

    Attributes:
        group_index_B: (B,) int64 in [0, G).
        batch: narrow, see `TokenBatch.widened`, with the columns `loss_mask` (bool: trained tokens)
            and `rollout_logprobs`, later `advantages`, `old_logprobs`, `ref_logprobs`.
        kept_B: (B,) bool: samples that are trained on; None: all.
        place: stores the batch where the ranks read it: `WorkerGroup.place`.
    """

    samples: tuple[ScoredSample, ...]
    group_index_B: Tensor
    batch: TokenBatch
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept_B: Tensor | None = None
    place: Place = as_it_is

    @property
    def trains(self) -> bool:
        """True if there is a sample to train on."""
        return bool(self.samples) and (self.kept_B is None or bool(self.kept_B.any()))

    @property
    def num_groups(self) -> int:
        """G, the number of prompts."""
        return int(self.group_index_B.max()) + 1 if self.samples else 0

    @property
    def rewards_B(self) -> Tensor:
        """(B,) float64: each sample's score plus shaping."""
        return torch.tensor([sample.reward for sample in self.samples], dtype=torch.float64)

    @cached_property
    def components(self) -> tuple[str, ...]:
        """Names: `SCORE`, then, sorted, the other reward values that every sample has."""
        others = [set(sample.extras) for sample in self.samples]
        return (SCORE, *sorted(set.intersection(*others) - {SCORE} if others else ()))

    @property
    def scores_BR(self) -> Tensor:
        """(B, R) float64 of the `components`."""
        names = self.components[1:]
        rows = [[each.score, *(each.extras[name] for name in names)] for each in self.samples]
        return torch.tensor(rows, dtype=torch.float64)

    def name_of(self, sample: int) -> str:
        """Return the name of a sample for error messages."""
        return self.samples[sample].trajectory.name

    def with_columns(self, **columns: Tensor) -> "Experience":
        """Return the same samples with per-token columns added."""
        return replace(self, batch=self.place(self.batch.with_columns(**columns)))

    def with_rows(self, **rows: Tensor) -> "Experience":
        """Return the same samples with per-sample values added."""
        return replace(self, batch=self.batch.with_rows(**rows))

    def check_components(self, compared: Iterable[str]) -> None:
        """Raise `RewardError` if a sample lacks a component that the estimator compares."""
        absent = {*compared} - {*self.components}
        for place, sample in enumerate(self.samples if absent else ()):
            for name in sorted(absent - {*sample.extras}):
                raise RewardError(
                    f"{self.name_of(place)}: the reward gave no finite number called {name!r}, "
                    f"which {KEYS} compares; have it give one to every sample, or name others"
                )

    def with_advantages(
        self,
        algorithm: AlgorithmConfig,
        kl_coef: float = 0.0,
        options: StrictModel | None = None,
    ) -> "Experience":
        """Add the column `advantages`, 0 on prompts, `returns` if there is a critic, and metrics.

        `options` are those of the estimator; None takes them from `algorithm`.
        """
        trajectories = [sample.trajectory for sample in self.samples]
        mask_T = self.batch.columns["loss_mask"] > 0
        outcomes_T = on_last_token(self.rewards_B, mask_T, self.batch)
        rewards_T = outcomes_T + segment_rewards_T(trajectories, self.batch)
        metrics = {**self.metrics}
        if algorithm.use_kl_in_reward:
            kl_T, kl = reward_kl(algorithm.kl_penalty, self.batch)
            rewards_T = rewards_T - kl_coef * kl_T.double()
            metrics |= {KL_IN_REWARD: kl, f"{KL_IN_REWARD}_coeff": kl_coef}
        # Copies, because an estimator may write to its columns; ids stay narrow.
        own = {name: column.clone() for name, column in self.batch.columns.items()}
        own["loss_mask"] = own["loss_mask"].float()
        found = advantages(
            algorithm,
            self.batch.with_columns(**own),
            rewards_T,
            self.group_index_B,
            scores_BR=self.scores_BR,
            components=self.components,
            truncated_B=torch.tensor([each.finish == "length" for each in trajectories]).bool(),
            options=options,
        )
        returns = {} if found.returns_T is None else {"returns": found.returns_T}
        added = self.with_columns(advantages=found.advantages_T, **returns)
        return replace(added, metrics={**metrics, **found.metrics}, kept_B=found.kept_B)

    def take(self, samples: Sequence[int]) -> "Experience":
        """Return the samples with these indices, which may repeat; group numbers stay."""
        index = torch.tensor(samples, dtype=torch.int64)
        return replace(
            self,
            samples=tuple(self.samples[index] for index in samples),
            group_index_B=self.group_index_B[index],
            batch=self.batch.select(samples),
            kept_B=None if self.kept_B is None else self.kept_B[index],
        )

    def mini_batches(self, num_groups: int, num_epochs: int) -> Iterator[TokenBatch]:
        """Yield batches of the kept samples of whole groups, the same in each epoch.

        There are as few as possible, of nearly equal size (5 groups by 4 are 3 and 2), because an
        optimizer step costs the same for any size.
        """
        kept_B = torch.ones(len(self.samples)).bool() if self.kept_B is None else self.kept_B
        sample_K = kept_B.nonzero().flatten()
        # Renumber the groups that are present: resampling may have dropped some.
        numbers, place_K = self.group_index_B[sample_K].unique(return_inverse=True)
        num_batches = math.ceil(len(numbers) / num_groups)
        batch_K = place_K * num_batches // max(1, len(numbers))
        for _ in range(num_epochs):
            for number in range(num_batches):
                yield self.batch.select(sample_K[batch_K == number].tolist())


class Collector:
    """Collects the groups of one RL step, generation batch by generation batch.

    Without dynamic sampling the first batch fills the step. `see` is None for text-only samples;
    `place` (`WorkerGroup.place`) stores the training batch where the ranks read it.
    """

    def __init__(
        self,
        num_groups: int,
        filter_groups: FilterGroupsConfig,
        see: See | None = None,
        place: Place = as_it_is,
    ) -> None:
        self._wanted, self._filter = num_groups, filter_groups
        self._see, self._place = see, place
        self._kept: list[list[ScoredSample]] = []
        self.batches: list[ScoredBatch] = []
        self.num_evicted = 0

    @property
    def full(self) -> bool:
        """True if no further generation batch is needed."""
        return len(self._kept) >= self._wanted or not self._filter.enable

    @property
    def num_groups(self) -> int:
        """Groups that the step trains on."""
        return min(len(self._kept), self._wanted)

    @property
    def num_surplus_groups(self) -> int:
        """Kept groups beyond those that the step trains on."""
        return len(self._kept) - self.num_groups

    def add(self, batch: ScoredBatch) -> None:
        """Add one generation batch and filter its groups."""
        self.batches.append(batch)
        scores = [sample.score for sample in batch.samples]
        keep_B = informative_samples(
            self._filter,
            torch.tensor(scores, dtype=torch.float64),
            torch.tensor([sample.group for sample in batch.samples], dtype=torch.int64),
        )
        self.num_evicted += int((~keep_B).sum())
        groups: dict[int, list[ScoredSample]] = {}
        for sample, keep in zip(batch.samples, keep_B.tolist(), strict=True):
            if keep:
                groups.setdefault(sample.group, []).append(sample)
        self._kept.extend(groups.values())

    def experience(self) -> Experience:
        """Return the first `num_groups` kept groups; samples of a large batch become its views."""
        chosen = self._kept[: self._wanted]
        samples = tuple(chain.from_iterable(chosen))
        index_B = torch.tensor([at for at, group in enumerate(chosen) for _ in group]).long()
        batch = self._place(self._packed(samples))
        if batch.num_tokens >= MIN_SHARED_TOKENS:
            samples = self._shared(samples, batch)
        return Experience(samples, index_B, batch, place=self._place)

    def scored(self) -> Experience:
        """Return all scored samples, kept or not."""
        samples = tuple(sample for batch in self.batches for sample in batch.samples)
        return Experience(
            samples,
            torch.tensor([sample.group for sample in samples], dtype=torch.int64),
            self._packed(samples),
        )

    def _shared(
        self, samples: tuple[ScoredSample, ...], batch: TokenBatch
    ) -> tuple[ScoredSample, ...]:
        """Replace `samples`, also in the collector's own lists, by views of their batch."""
        trajectories = viewed([sample.trajectory for sample in samples], batch)
        views = tuple(
            replace(sample, trajectory=trajectory)
            for sample, trajectory in zip(samples, trajectories, strict=True)
        )
        view_of = dict(zip(map(id, samples), views, strict=True))
        self._kept = [[view_of.get(id(each), each) for each in group] for group in self._kept]
        self.batches = [
            replace(each, samples=tuple(view_of.get(id(sample), sample) for sample in each.samples))
            for each in self.batches
        ]
        return views

    def _packed(self, samples: Sequence[ScoredSample]) -> TokenBatch:
        batch = pack([sample.trajectory for sample in samples], self._see)
        greedy = [sample.greedy_reward for sample in samples if sample.greedy_reward is not None]
        if not greedy:
            return batch
        return batch.with_rows(**{GREEDY_SCORES: torch.tensor(greedy, dtype=torch.float64)})


def informative_samples(
    filter_groups: FilterGroupsConfig, scores_B: Tensor, group_index_B: Tensor
) -> Tensor:
    """Return (B,) bool, True for samples whose group has at least two different scores.

    DAPO, arXiv:2503.14476 eq. 11. In GRPO a group of equal scores, or of one sample, has advantage
    0 and only dilutes the mean. If `filter_groups` is off, all are kept.
    """
    if not filter_groups.enable or scores_B.numel() == 0:
        return torch.ones(scores_B.shape, dtype=torch.bool, device=scores_B.device)
    groups = group_statistics(scores_B, group_index_B, int(group_index_B.max()) + 1)
    return ~groups.equal_P[group_index_B]


def check_aborted(
    completions: Sequence[Sequence[Completion]], max_aborted_frac: float, timeout_s: float
) -> None:
    """Raise `RolloutError` if more than `max_aborted_frac` of a generation batch was aborted."""
    reasons = [completion.finish_reason for row in completions for completion in row]
    num_aborted = reasons.count("abort")
    if num_aborted > max_aborted_frac * len(reasons):
        raise RolloutError(
            f"rollout.timeout_s: got {timeout_s:g}; {num_aborted} of {len(reasons)} samples were "
            f"unfinished by then, more than rl.max_aborted_frac = {max_aborted_frac:g}, and the "
            "remaining ones are the short ones; need time for all of them; raise it, or lower "
            "rl.sampling.max_new_tokens"
        )
