"""The samples of a step with their packed tokens, and their split into mini-batches.

Letters: B samples, K of them kept, T tokens, G groups (prompts), R reward components.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from engines.algorithms.advantage import SCORE, advantages
from engines.algorithms.reward_shaping import reward_kl
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig
from engines.config.rules.models import KEYS, compared_components
from engines.errors import RewardError
from engines.trainers.packing import segment_rewards_T
from engines.trainers.scoring import ScoredSample
from engines.types import TokenBatch

KL_IN_REWARD = "actor/reward_kl_penalty"

Place = Callable[[TokenBatch], TokenBatch]


def as_it_is(batch: TokenBatch) -> TokenBatch:
    """Return the batch itself: the `Place` of a single process."""
    return batch


@dataclass(frozen=True)
class Experience:
    """The samples of one RL step, groups together, and their packed tokens.

    Attributes:
        group_index_B: (B,) int64 in [0, G).
        batch: narrow, see `TokenBatch.widened`, with the columns `loss_mask` (bool: sampled tokens)
            and `rollout_logprobs`, later `advantages`, `old_logprobs`, `ref_logprobs`.
        metrics: metrics of the advantage estimator.
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
        """G."""
        return int(self.group_index_B.max()) + 1 if self.samples else 0

    @property
    def rewards_B(self) -> Tensor:
        """(B,) float64."""
        return torch.tensor([sample.reward for sample in self.samples], dtype=torch.float64)

    @property
    def scores_B(self) -> Tensor:
        """(B,) float64."""
        return torch.tensor([sample.score for sample in self.samples], dtype=torch.float64)

    @property
    def truncated_B(self) -> Tensor:
        """(B,) bool: cut at the length limit."""
        return torch.tensor([s.trajectory.finish == "length" for s in self.samples]).bool()

    def with_columns(self, **columns: Tensor) -> "Experience":
        """Return the same samples with per-token columns added."""
        return replace(self, batch=self.place(self.batch.with_columns(**columns)))

    def with_rows(self, **rows: Tensor) -> "Experience":
        """Return the same samples with per-sample values added."""
        return replace(self, batch=self.batch.with_rows(**rows))

    def name_of(self, sample: int) -> str:
        """Return the name of a sample for error messages."""
        return self.samples[sample].trajectory.name

    @property
    def positive_T(self) -> Tensor:
        """(T,) float32: 1 on the sampled tokens of right answers."""
        correct_B = torch.tensor([sample.correct for sample in self.samples]).float()
        return correct_B[self.batch.sequence_index_T] * self.batch.columns["loss_mask"]

    @cached_property
    def components(self) -> tuple[str, ...]:
        """The score, then the names of the other values that every sample has, sorted."""
        others = [set(sample.extras) for sample in self.samples]
        return (SCORE, *sorted(set.intersection(*others) - {SCORE} if others else ()))

    @cached_property
    def scores_BR(self) -> Tensor:
        """(B, R) float64 of the `components`."""
        names = self.components[1:]
        rows = [
            [sample.score, *(extras[name] for name in names)]
            for sample, extras in ((each, each.extras) for each in self.samples)
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def _check_components(self, names: Sequence[str]) -> None:
        absent = {*names} - {*self.components}
        for place, sample in enumerate(self.samples if absent else ()):
            for name in sorted(absent - {*sample.extras}):
                raise RewardError(
                    f"{self.name_of(place)}: the reward gave no finite number called {name!r}, "
                    f"which {KEYS} compares; have it give one to every sample, or name others"
                )

    def with_advantages(self, algorithm: AlgorithmConfig, kl_coef: float = 0.0) -> "Experience":
        """Add the column `advantages`, 0 on prompts, `returns` if there is a critic, and metrics.

        Raises:
            RewardError: a sample lacks a component that the estimator compares.
        """
        self._check_components(compared_components(algorithm))
        mask_T = self.batch.columns["loss_mask"] > 0
        trajectories = [sample.trajectory for sample in self.samples]
        rewards_T = on_last_token(self.rewards_B, mask_T, self.batch)
        rewards_T = rewards_T + segment_rewards_T(trajectories, self.batch)
        kl_metrics: dict[str, float] = {}
        if algorithm.use_kl_in_reward:
            kl_T, kl = reward_kl(algorithm.kl_penalty, self.batch)
            rewards_T = rewards_T - kl_coef * kl_T.double()
            kl_metrics = {KL_IN_REWARD: kl, f"{KL_IN_REWARD}_coeff": kl_coef}
        found = advantages(
            algorithm,
            self._own_batch(),
            rewards_T,
            self.group_index_B,
            scores_BR=self.scores_BR,
            components=self.components,
            truncated_B=self.truncated_B,
        )
        returns = {} if found.returns_T is None else {"returns": found.returns_T}
        batch = self.place(self.batch.with_columns(advantages=found.advantages_T, **returns))
        metrics = {**self.metrics, **kl_metrics, **found.metrics}
        return replace(self, batch=batch, metrics=metrics, kept_B=found.kept_B)

    def _own_batch(self) -> TokenBatch:
        """Return a copy that estimators may write to, with a float32 mask; ids stay narrow."""
        columns = {name: column.clone() for name, column in self.batch.columns.items()}
        columns["loss_mask"] = columns["loss_mask"].float()
        return self.batch.with_columns(**columns)

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
