"""Pairs of answers as a training set: of a policy (DPO and its family), and of a reward model.

Promises: a pair is one unit, which no rank and no micro-batch tears apart; held-out pairs are
looked at with the rewards that the loss itself compares, a tie counting half.
Does not promise that a policy of a high accuracy writes such answers itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from statistics import fmean
from typing import Protocol

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
from engines.algorithms.preference.kto import MISMATCH
from engines.algorithms.preference.mismatch import mismatched
from engines.algorithms.preference.objectives import preference_objective
from engines.algorithms.preference.options import RewardModelOptions, SigmoidOptions
from engines.algorithms.preference.pair_losses import sigmoid_loss
from engines.algorithms.preference.pair_objective import PairObjective
from engines.algorithms.preference.reward_objective import BEHIND, RewardModelObjective
from engines.config.sections import PreferenceConfig, RewardTrainingConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.data.order.training_order import VisitedRow
from engines.data.read.by_place import Made
from engines.data.read.pairs import Pair
from engines.trainers.evaluation.repeated import share_interval, sums_by_problem
from engines.trainers.guards.poison import ROW
from engines.training import roles
from engines.training.roles import RoleName
from engines.training.spec import LossFn
from engines.types import ModelOutputs, TokenBatch
from infra.errors import ConfigError
from infra.tracking.comparison import NUM_PAIRS, PAIR_ACCURACY, PAIR_MARGIN

CONFIDENCE = 0.95


class PolicyPairs:
    """Pairs that a policy learns from.

    Args:
        config: the loss and its options.
        pairs: to train on, at least one.
        held_out: to look at; may be none.
        max_length: tokens of the longest sequence, for the reference point of `kto`.
    """

    role: RoleName = roles.POLICY

    def __init__(
        self,
        config: PreferenceConfig,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
        max_length: int,
    ) -> None:
        self._pairs, self._held_out, self._max_length = pairs, held_out, max_length
        self._chunk = config.batch_size_pairs
        self.measures_every = config.held_out_every_num_steps
        objective = preference_objective(config.loss, config.options)
        self.loss_fn: LossFn = objective
        self._is_paired = isinstance(objective, PairObjective)
        # Answers by themselves are compared as DPO would, whose rewards are the same.
        self._judge = (
            objective
            if isinstance(objective, PairObjective)
            else PairObjective(sigmoid_loss, SigmoidOptions(beta=objective.options.beta))
        )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probabilities of the reference."""
        return REFERENCE in self._judge.required_columns

    @property
    def visited(self) -> Sequence[VisitedRow]:
        """Pairs, by the longer of their conversations."""
        return visited(self._pairs)

    @property
    def largest_unit(self) -> int:
        """The largest pair, or a prompt with the longest answer to another."""
        held_out = largest_pair(self._held_out)
        if self._is_paired:
            return max(held_out, largest_pair(self._pairs))
        return max(held_out, longest_exchanged(self._pairs, self._max_length))

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """See `TrainingSet.batch`."""
        return packed([self._pairs[row] for row in rows], rows, paired=self._is_paired)

    def complete(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:
        """The reference's log-probabilities, and the reference point of `kto`."""
        batch = self._with_reference(batch, workers)
        if self._is_paired:
            return batch
        other = mismatched(batch, self._max_length)
        policy_T = workers.run(ModelWorker.infer_logprobs, other)
        answers = answers_of(policy_T, self._with_reference(other, workers), reference=True)
        return batch.with_rows(**{MISMATCH: answers.log_ratio_N})

    def measure(self, workers: WorkerGroup) -> Mapping[str, float]:
        """See `measured`."""

        def judged(batch: TokenBatch) -> tuple[PairLoss, Pairs]:
            batch = self._with_reference(batch, workers)
            return self._judge.of_pairs(workers.run(ModelWorker.infer, batch), batch)

        return measured(self._held_out, self._chunk, judged)

    def name_of(self, row: int) -> str:
        """By its number in the data."""
        return f"row {self._pairs[row].index} of data.preference"

    def _with_reference(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:
        if not self.needs_reference:
            return batch
        logprobs_T = workers.run(ModelWorker.infer_logprobs, batch, roles.REFERENCE)
        return batch.with_columns(**{REFERENCE: logprobs_T})


class RewardPairs:
    """Pairs that a reward model learns from.

    Args:
        config: options of the loss.
        options: of the loss, validated.
        pairs: to train on, at least one.
        held_out: to look at; may be none.

    Raises:
        ConfigError: the loss wants margins, and a pair to train on has none.
    """

    role: RoleName = roles.REWARD

    def __init__(
        self,
        config: RewardTrainingConfig,
        options: RewardModelOptions,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
    ) -> None:
        self._pairs, self._held_out = pairs, held_out
        self._chunk = config.batch_size_pairs
        self.measures_every = config.held_out_every_num_steps
        self._objective = RewardModelObjective(options)
        self.loss_fn: LossFn = self._objective
        if options.margin_coef:
            self._check_margins()

    @property
    def visited(self) -> Sequence[VisitedRow]:
        """Pairs, by the longer of their conversations."""
        return visited(self._pairs)

    @property
    def largest_unit(self) -> int:
        """The largest pair."""
        return max(largest_pair(self._pairs), largest_pair(self._held_out))

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """See `TrainingSet.batch`."""
        return packed([self._pairs[row] for row in rows], rows, paired=True)

    def complete(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:  # noqa: ARG002
        """Nothing is missing."""
        return batch

    def measure(self, workers: WorkerGroup) -> Mapping[str, float]:
        """See `measured`."""

        def judged(batch: TokenBatch) -> tuple[PairLoss, Pairs]:
            outputs: ModelOutputs = workers.run(ModelWorker.infer, batch, BEHIND, self.role)
            return self._objective.of_pairs(outputs, batch)

        return measured(self._held_out, self._chunk, judged)

    def name_of(self, row: int) -> str:
        """By its number in the data."""
        return f"row {self._pairs[row].index} of data.preference"

    def _check_margins(self) -> None:
        bare = next((pair for pair in self._pairs if pair.margin is None), None)
        if bare is not None:
            raise ConfigError(
                "reward_model.options.margin_coef",
                f"got {self._objective.options.margin_coef}; row {bare.index} of data.preference, "
                f"of {bare.data_source}, has no margin; need one on every row; add the column "
                "`margin`, or set this to 0",
            )


class Judged(Protocol):
    """Rewards of the pairs of a batch."""

    def __call__(self, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Without gradient."""
        ...


def visited(pairs: Sequence[Pair]) -> Sequence[VisitedRow]:
    """Pairs as an order sees them."""
    return Made(pairs, _visited)


def largest_pair(pairs: Iterable[Pair]) -> int:
    """Tokens of the pair that has most, both conversations together; 0 of none."""
    return max((len(p.chosen.input_ids) + len(p.rejected.input_ids) for p in pairs), default=0)


def longest_exchanged(pairs: Iterable[Pair], max_length: int) -> int:
    """Most tokens that a prompt may have with an answer of any pair; see `mismatched`.

    Args:
        pairs: at least one.
        max_length: that answers are cut to.

    Returns:
        An upper bound; answers at hand included.
    """
    prompt = answer = 0
    for side in (side for pair in pairs for side in (pair.chosen, pair.rejected)):
        start = side.loss_mask.index(1) if 1 in side.loss_mask else len(side.loss_mask)
        prompt, answer = max(prompt, start), max(answer, len(side.loss_mask) - start)
    return min(max_length, prompt + answer)


def _visited(pair: Pair) -> VisitedRow:
    longer = max(map(len, (pair.chosen.input_ids, pair.rejected.input_ids)))
    return VisitedRow(pair.data_source, longer, {})


def packed(pairs: Sequence[Pair], rows: Sequence[int], *, paired: bool) -> TokenBatch:
    """Pairs end to end, the chosen answer of each first.

    Args:
        pairs: at least one.
        rows: what numbers each of them.
        paired: the two answers of a pair are a unit.

    Returns:
        With the column `loss_mask` and the rows `chosen`, `margin` and `guards.poison.ROW`.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    batch = TokenBatch.from_sequences(
        [side.input_ids for side in sides], loss_mask=[side.loss_mask for side in sides]
    )
    numbers = torch.tensor(rows, dtype=torch.int64).repeat_interleave(2)
    margin = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float64)
    batch = batch.with_rows(
        **{
            CHOSEN: torch.tensor([1.0, 0.0]).repeat(len(pairs)),
            MARGIN: margin.repeat_interleave(2),
            ROW: numbers,
        }
    )
    # A batch that spans two epochs may hold a row twice: its pairs are two units all the same.
    unit_B = torch.arange(len(pairs)).repeat_interleave(2) if paired else None
    return TokenBatch(
        batch.input_ids_T, batch.cu_seqlens, batch.columns, rows=batch.rows, unit_B=unit_B
    )


def measured(held_out: Sequence[Pair], chunk: int, judged: Judged) -> Mapping[str, float]:
    """Look at held-out pairs.

    Args:
        held_out: may be none.
        chunk: pairs of one look, which bounds what is in memory.
        judged: gives their rewards.

    Returns:
        `pair_accuracy`, the share whose chosen answer has the larger reward, a tie counting half;
        `pair_accuracy_low` and `_high` of its Wilson interval, for which equal pairs are one;
        `pair_margin`, the mean difference
        of the rewards; `num_pairs`. Nothing of no pairs.
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
    """Equal of rows that hold one pair."""
    sides = (pair.chosen.input_ids, pair.rejected.input_ids)
    return sha256(repr(sides).encode()).digest()
