"""The samples of a step beside their packed tokens, and how they become mini-batches.

Promises: every sample keeps the group of its prompt, and its place among the samples.
Letters: B samples, K of them kept, T tokens, G groups (prompts).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from engines.algorithms.advantage import SCORE, advantages
from engines.algorithms.reward_kl import reward_kl
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig
from engines.config.rules.components import KEYS, compared_components
from engines.errors import RewardError
from engines.trainers.samples.packing import segment_rewards_T
from engines.trainers.samples.scored import ScoredSample
from engines.types import TokenBatch

KL_IN_REWARD = "actor/reward_kl_penalty"

Place = Callable[[TokenBatch], TokenBatch]


def as_it_is(batch: TokenBatch) -> TokenBatch:
    """A `Place` where there is one process."""
    return batch


@dataclass(frozen=True)
class Experience:
    """The samples of one RL step and their packed tokens.

    Attributes:
        samples: B samples, groups together.
        group_index_B: (B,) int64 in [0, G).
        batch: narrow, see `TokenBatch.widened`, with the columns `loss_mask` (bool: sampled tokens)
            and `rollout_logprobs`, later `advantages`, `old_logprobs`, `ref_logprobs`.
        metrics: what the estimator says of the step.
        kept_B: (B,) bool: samples that are trained on; None: all.
        place: puts the batch where the ranks read it: `WorkerGroup.place`.
    """

    samples: tuple[ScoredSample, ...]
    group_index_B: Tensor
    batch: TokenBatch
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept_B: Tensor | None = None
    place: Place = as_it_is

    @property
    def trains(self) -> bool:
        """Whether there is a sample to train on."""
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
        """The same samples with per-token columns added."""
        return replace(self, batch=self.place(self.batch.with_columns(**columns)))

    def with_rows(self, **rows: Tensor) -> "Experience":
        """The same samples with values of whole samples added."""
        return replace(self, batch=self.batch.with_rows(**rows))

    def name_of(self, sample: int) -> str:
        """What a sample is called in an error line."""
        return self.samples[sample].trajectory.name

    @property
    def positive_T(self) -> Tensor:
        """(T,) float32: 1 on the sampled tokens of right answers."""
        correct_B = torch.tensor([sample.correct for sample in self.samples]).float()
        return correct_B[self.batch.sequence_index_T] * self.batch.columns["loss_mask"]

    @cached_property
    def components(self) -> tuple[str, ...]:
        """Names of what the reward gave every sample: the score, then the others, sorted."""
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
        """Refuse a step in which an estimator would compare less than it is to."""
        absent = {*names} - {*self.components}
        for place, sample in enumerate(self.samples if absent else ()):
            for name in sorted(absent - {*sample.extras}):
                raise RewardError(
                    f"{self.name_of(place)}: the reward gave no finite number called {name!r}, "
                    f"which {KEYS} compares; have it give one to every sample, or name others"
                )

    def with_advantages(self, algorithm: AlgorithmConfig, kl_coef: float = 0.0) -> "Experience":
        """Add the column `advantages`, 0 on the prompt, and `returns` where there is a critic.

        Args:
            algorithm: names the estimator; see `resolved_algorithm` for what it compares.
            kl_coef: of the KL in the reward, where there is one.

        Returns:
            The same samples, with those that the estimator keeps; `metrics` has what it says, and
            `KL_IN_REWARD`.

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
        """As estimators read it, and may write to it: the mask is float32; the ids stay narrow."""
        columns = {name: column.clone() for name, column in self.batch.columns.items()}
        columns["loss_mask"] = columns["loss_mask"].float()
        return self.batch.with_columns(**columns)

    def take(self, samples: Sequence[int]) -> "Experience":
        """The named samples, some perhaps more than once; groups keep their numbers."""
        index = torch.tensor(samples, dtype=torch.int64)
        return replace(
            self,
            samples=tuple(self.samples[index] for index in samples),
            group_index_B=self.group_index_B[index],
            batch=self.batch.select(samples),
            kept_B=None if self.kept_B is None else self.kept_B[index],
        )

    def mini_batches(self, num_groups: int, num_epochs: int) -> Iterator[TokenBatch]:
        """Batches of what is kept of whole groups, each epoch alike.

        As few as hold at most `num_groups` each, and as equal as can be: 5 groups by 4 are 3 and
        2, not 4 and 1, for an optimizer step is as long whatever its batch.
        """
        kept_B = torch.ones(len(self.samples)).bool() if self.kept_B is None else self.kept_B
        sample_K = kept_B.nonzero().flatten()
        # Groups that are here: samples that were drawn again may have left some out.
        numbers, place_K = self.group_index_B[sample_K].unique(return_inverse=True)
        num_batches = math.ceil(len(numbers) / num_groups)
        batch_K = place_K * num_batches // max(1, len(numbers))
        for _ in range(num_epochs):
            for number in range(num_batches):
                yield self.batch.select(sample_K[batch_K == number].tolist())
