"""Answer pairs as a training set, for a policy (DPO family) or a reward model.

Promises: a loss over pairs gets whole pairs, each on one rank; held-out pairs are compared by the
rewards of the loss. Does not promise that a policy of high accuracy generates such answers.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from statistics import fmean

import torch

from engines.algorithms.preference.answers import (
    CHOSEN,
    MARGIN,
    REFERENCE,
    PairLoss,
    Pairs,
    answers_of,
    right_side,
)
from engines.algorithms.preference.kto import MISMATCH, mismatched
from engines.algorithms.preference.options import RewardModelOptions, SigmoidOptions
from engines.algorithms.preference.pair_objective import (
    BEHIND,
    PairObjective,
    RewardModelObjective,
    preference_objective,
    sigmoid_loss,
)
from engines.config.sections import PreferenceConfig, RewardTrainingConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.data.order import VisitedRow
from engines.data.read.examples import Pair
from engines.data.read.lazy_sequence import Made
from engines.trainers.evaluation.accuracy import share_interval, sums_by_problem
from engines.trainers.nonfinite_guard import ROW
from engines.trainers.supervised.training_set import TrainingSet
from engines.training import spec
from engines.training.spec import LossFn
from engines.types import TokenBatch
from infra.errors import ConfigError
from infra.tracking.comparison import NUM_PAIRS, PAIR_ACCURACY, PAIR_MARGIN

CONFIDENCE = 0.95


class _PairRows(TrainingSet):
    """Base class of the training sets of pairs, for a policy or a reward model."""

    _is_paired = True

    def __init__(
        self,
        config: PreferenceConfig | RewardTrainingConfig,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
    ) -> None:
        self._pairs, self._held_out = pairs, held_out
        self._chunk = config.batch_size_pairs
        self.measures_every = config.held_out_every_num_steps

    @property
    def visited(self) -> Sequence[VisitedRow]:
        """Pairs, with the length of the longer conversation."""
        return Made(
            self._pairs,
            lambda pair: VisitedRow(
                pair.data_source, max(len(pair.chosen.input_ids), len(pair.rejected.input_ids)), {}
            ),
        )

    @property
    def largest_unit(self) -> int:
        """Tokens of the largest pair."""
        return max(largest_pair(self._pairs), largest_pair(self._held_out))

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """See `TrainingSet.batch`."""
        return packed([self._pairs[row] for row in rows], rows, paired=self._is_paired)

    def measure(self, workers: WorkerGroup) -> Mapping[str, float]:
        """See `measured`."""
        return measured(self._held_out, self._chunk, partial(self._judged, workers))

    @abstractmethod
    def _judged(self, workers: WorkerGroup, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Compute the rewards of the pairs of a batch, without gradient."""

    def name_of(self, row: int) -> str:
        """Return the row's number in the data."""
        return f"row {self._pairs[row].index} of data.preference"


class PolicyPairs(_PairRows):
    """Pairs for a policy; `max_length` (tokens) cuts the exchanged answers of `kto`."""

    def __init__(
        self,
        config: PreferenceConfig,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
        max_length: int,
    ) -> None:
        super().__init__(config, pairs, held_out)
        self._max_length = max_length
        objective = preference_objective(config.loss, config.options)
        self.loss_fn: LossFn = objective
        self._is_paired = isinstance(objective, PairObjective)
        # Unpaired losses are measured with DPO's rewards, which are the same.
        self._judge = (
            objective
            if isinstance(objective, PairObjective)
            else PairObjective(sigmoid_loss, SigmoidOptions(beta=objective.options.beta))
        )

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads logprobs of the reference."""
        return self._judge.options.needs_reference

    @property
    def largest_unit(self) -> int:
        """Tokens of the largest pair; for `kto` of a held-out pair or of an exchanged answer."""
        if self._is_paired:
            return super().largest_unit
        exchanged = longest_exchanged(self._pairs, self._max_length)
        return max(largest_pair(self._held_out), exchanged)

    def complete(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:
        """Add the reference's logprobs, and the reference point of `kto`."""
        batch = self._with_reference(batch, workers)
        if self._is_paired:
            return batch
        other = mismatched(batch, self._max_length)
        policy_T = workers.run(ModelWorker.infer_logprobs, other)
        answers = answers_of(policy_T, self._with_reference(other, workers), reference=True)
        return batch.with_rows(**{MISMATCH: answers.log_ratio_N})

    def _judged(self, workers: WorkerGroup, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        batch = self._with_reference(batch, workers)
        return self._judge.of_pairs(workers.run(ModelWorker.infer, batch), batch)

    def _with_reference(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:
        if not self.needs_reference:
            return batch
        logprobs_T = workers.run(ModelWorker.infer_logprobs, batch, spec.REFERENCE)
        return batch.with_columns(**{REFERENCE: logprobs_T})


class RewardPairs(_PairRows):
    """Pairs for a reward model; `ConfigError` if a pair lacks a margin that the loss reads."""

    role = spec.REWARD

    def __init__(
        self,
        config: RewardTrainingConfig,
        options: RewardModelOptions,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
    ) -> None:
        super().__init__(config, pairs, held_out)
        self._objective = RewardModelObjective(options)
        self.loss_fn: LossFn = self._objective
        bare = next((pair for pair in pairs if options.margin_coef and pair.margin is None), None)
        if bare is not None:
            raise ConfigError(
                "reward_model.options.margin_coef",
                f"got {options.margin_coef}; row {bare.index} of data.preference, of "
                f"{bare.data_source}, has no margin; need one on every row; add the column "
                "`margin`, or set this to 0",
            )

    def _judged(self, workers: WorkerGroup, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        outputs = workers.run(ModelWorker.infer, batch, BEHIND, self.role)
        return self._objective.of_pairs(outputs, batch)


def largest_pair(pairs: Iterable[Pair]) -> int:
    """Return the tokens of the largest pair, both conversations together; 0 without pairs."""
    return max((len(p.chosen.input_ids) + len(p.rejected.input_ids) for p in pairs), default=0)


def longest_exchanged(pairs: Iterable[Pair], max_length: int) -> int:
    """Return an upper bound of the tokens of a prompt with any pair's answer; see `mismatched`."""
    prompt = answer = 0
    for side in (side for pair in pairs for side in (pair.chosen, pair.rejected)):
        start = side.loss_mask.index(1) if 1 in side.loss_mask else len(side.loss_mask)
        prompt, answer = max(prompt, start), max(answer, len(side.loss_mask) - start)
    return min(max_length, prompt + answer)


def packed(pairs: Sequence[Pair], rows: Sequence[int], *, paired: bool) -> TokenBatch:
    """Concatenate pairs, chosen answer first; with `paired` a pair's answers are one unit.

    The batch has the column `loss_mask` and the rows `chosen`, `margin` and `ROW`, from `rows`.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    batch = TokenBatch.from_sequences(
        [side.input_ids for side in sides], loss_mask=[side.loss_mask for side in sides]
    )
    margin = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float64)
    return replace(
        batch,
        rows={
            CHOSEN: torch.tensor([1.0, 0.0]).repeat(len(pairs)),
            MARGIN: margin.repeat_interleave(2),
            ROW: torch.tensor(rows, dtype=torch.int64).repeat_interleave(2),
        },
        # Units are numbered by place: a batch that spans two epochs may hold a row twice.
        unit_B=torch.arange(len(pairs)).repeat_interleave(2) if paired else None,
    )


def measured(
    held_out: Sequence[Pair], chunk: int, judged: Callable[[TokenBatch], tuple[PairLoss, Pairs]]
) -> Mapping[str, float]:
    """Return metrics of held-out pairs, judged `chunk` pairs at a time; empty without pairs.

    `pair_accuracy` is the share of pairs whose chosen answer has the larger reward (a tie counts
    half), `_low` and `_high` its Wilson interval over distinct pairs; `pair_margin` is the mean
    difference of the rewards; and `num_pairs`.
    """
    margins: list[float] = []
    for start in range(0, len(held_out), chunk):
        part = held_out[start : start + chunk]
        found, _ = judged(packed(part, range(len(part)), paired=True))
        margins += (found.chosen_reward_P - found.rejected_reward_P).tolist()
    if not margins:
        return {}
    right = right_side(torch.tensor(margins, dtype=torch.float64)).tolist()
    pairs = sums_by_problem(zip(map(_digest, held_out), right, strict=True))
    low, high = share_interval(pairs, CONFIDENCE)
    return {
        PAIR_ACCURACY: sum(right) / len(margins),
        f"{PAIR_ACCURACY}_low": low,
        f"{PAIR_ACCURACY}_high": high,
        PAIR_MARGIN: fmean(margins),
        NUM_PAIRS: float(len(margins)),
    }


def _digest(pair: Pair) -> bytes:
    """Return the same digest for rows with the same pair."""
    return sha256(repr((pair.chosen.input_ids, pair.rejected.input_ids)).encode()).digest()
