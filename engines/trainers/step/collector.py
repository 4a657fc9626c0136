"""Gathers the scored samples of a step until it has the groups that it trains on.

Promises: a sample that could not be scored, or was aborted, is counted and left out, never
scored 0; with dynamic sampling, groups that teach nothing are left out too. The order of samples
is the order of the prompts and their samples.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engines.algorithms.filtering import informative_samples
from engines.config.algorithm import FilterGroupsConfig
from engines.trainers.samples.packing import See, pack, viewed
from engines.trainers.samples.prompts import GREEDY_SCORES
from engines.trainers.samples.scored import ScoredBatch, ScoredSample
from engines.trainers.step.experience import Experience, Place, as_it_is
from engines.types import TokenBatch

MIN_SHARED_TOKENS = 1 << 20
"""Below it making views takes more time than their 8 bytes a token are worth."""


class Collector:
    """Gathers the groups of one RL step, generation batch by generation batch.

    Args:
        num_groups: prompts that the step trains on.
        filter_groups: dynamic sampling; switched off, the first batch fills the step.
        see: makes patches of the samples' images; None: they show none.
        place: puts what is trained on where the ranks read it: `WorkerGroup.place`.
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
        """Whether another generation batch is pointless."""
        return len(self._kept) >= self._wanted or not self._filter.enable

    @property
    def num_groups(self) -> int:
        """Groups that the step trains on."""
        return min(len(self._kept), self._wanted)

    @property
    def num_surplus_groups(self) -> int:
        """Groups that were kept and are more than the step trains on."""
        return max(0, len(self._kept) - self._wanted)

    def add(self, batch: ScoredBatch) -> None:
        """Take one generation batch and filter its groups."""
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
        """The first `num_groups` groups that were kept; it may be empty.

        From here on the tokens of a step of `MIN_SHARED_TOKENS` are held once, in the batch.
        """
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
        """These samples as views of their batch, held in their place from here on."""
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
        """Everything that was scored, kept or not."""
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
