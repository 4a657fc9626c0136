"""Collect the scored samples of a step until it has enough groups to train on.

Promises: unscored and aborted samples, and with dynamic sampling uninformative groups, are left out
and counted, never scored 0. Samples keep the order of their prompts. Too many aborted samples are
an error: without the longest answers the policy would learn to be short.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engines.algorithms.groups import informative_samples
from engines.config.algorithm import FilterGroupsConfig
from engines.errors import RolloutError
from engines.trainers.packing import See, pack, viewed
from engines.trainers.prompts import GREEDY_SCORES
from engines.trainers.rollout_batch import Experience, Place, as_it_is
from engines.trainers.scoring import ScoredBatch, ScoredSample
from engines.types import Completion, TokenBatch

MIN_SHARED_TOKENS = 1 << 20
"""Below this, creating views takes more time than their 8 bytes per token are worth."""


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
        self._wanted = num_groups
        self._filter = filter_groups
        self._see = see
        self._place = place
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
        return max(0, len(self._kept) - self._wanted)

    def add(self, batch: ScoredBatch) -> None:
        """Add one generation batch and filter its groups."""
        self.batches.append(batch)
        samples = batch.samples
        groups: dict[int, list[ScoredSample]] = {}
        keep_B = informative_samples(
            self._filter,
            torch.tensor([sample.score for sample in samples], dtype=torch.float64),
            torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        )
        for sample, keep in zip(samples, keep_B.tolist(), strict=True):
            if keep:
                groups.setdefault(sample.group, []).append(sample)
            else:
                self.num_evicted += 1
        self._kept.extend(groups.values())

    def experience(self) -> Experience:
        """Return the first `num_groups` kept groups; samples of a large one become views."""
        chosen = self._kept[: self._wanted]
        samples = tuple(sample for group in chosen for sample in group)
        index_B = torch.tensor([at for at, group in enumerate(chosen) for _ in group]).long()
        batch = self._place(_packed(samples, self._see))
        if batch.num_tokens >= MIN_SHARED_TOKENS:
            samples = self._shared(samples, batch)
        return Experience(samples, index_B, batch, place=self._place)

    def _shared(
        self, samples: tuple[ScoredSample, ...], batch: TokenBatch
    ) -> tuple[ScoredSample, ...]:
        """Replace these samples by views of their batch."""
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

    def scored(self) -> Experience:
        """Return all scored samples, kept or not."""
        samples = tuple(sample for batch in self.batches for sample in batch.samples)
        index = [sample.group for sample in samples]
        return Experience(
            samples, torch.tensor(index, dtype=torch.int64), _packed(samples, self._see)
        )


def _packed(samples: Sequence[ScoredSample], see: See | None) -> TokenBatch:
    batch = pack([sample.trajectory for sample in samples], see)
    greedy = [sample.greedy_reward for sample in samples if sample.greedy_reward is not None]
    if not greedy:
        return batch
    return batch.with_rows(**{GREEDY_SCORES: torch.tensor(greedy, dtype=torch.float64)})


def check_aborted(
    completions: Sequence[Sequence[Completion]], max_aborted_frac: float, timeout_s: float
) -> None:
    """Raise `RolloutError` if more than `max_aborted_frac` of a generation batch was aborted."""
    reasons = [completion.finish_reason for row in completions for completion in row]
    num_aborted = reasons.count("abort")
    if num_aborted <= max_aborted_frac * len(reasons):
        return
    raise RolloutError(
        f"rollout.timeout_s: got {timeout_s:g}; {num_aborted} of {len(reasons)} samples were "
        f"unfinished by then, more than rl.max_aborted_frac = {max_aborted_frac:g}, and those that "
        "are left are the short ones; need time for all of them; raise it, or lower "
        "rl.sampling.max_new_tokens"
    )
