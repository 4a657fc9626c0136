"""What the ranks agree on before a step: counts, and the number of micro-batches.

All checks run after the exchange, so that all ranks raise together and none waits in a collective.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from engines import collectives
from engines.errors import EngineError
from engines.training.flops import TrainingFlops
from engines.training.model.image_layout import (
    ImageLayout,
    find_image_fault,
    raise_image_fault,
)
from engines.training.step.micro_batches import (
    MicroBatch,
    cut,
    filler,
    loss_counts,
    plan_micro_batches,
    trained_first_token,
)
from engines.training.step.optimizer_step import StepWork
from engines.types import GlobalCounts, TokenBatch
from infra.errors import ConfigError


@dataclass(frozen=True)
class Preparation:
    """One rank's part of a step: denominators and work of all ranks, and micro-batches.

    The number of micro-batches is the same on every rank; fillers come first.
    """

    counts: GlobalCounts
    work: StepWork
    micro_batches: list[MicroBatch]


def prepare(
    batch: TokenBatch,
    max_tokens: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    flops: TrainingFlops | None = None,
    image_layout: ImageLayout | None = None,
    rotary_limit: int | None = None,
) -> Preparation:
    """Cut this rank's batch, on the CPU, into the same number of micro-batches on every rank.

    `flops` balances micro-batches by operations instead of tokens. `rotary_limit` is the longest
    sequence that does not change the others of a micro-batch.

    Raises:
        EngineError: a rank has no sequence, a sequence has no token, images do not fit, or a loss
            mask is not 0 at a first token.
        ConfigError: a sequence exceeds the budget, or the model's `rotary_limit`.
    """
    lengths, units = batch.lengths_B.tolist(), batch.units
    costs = flops.model.sequence_costs(lengths) if flops is not None else None
    plan = plan_micro_batches(lengths, max_tokens, costs=costs, units=units)
    own_sums = _sums_of(batch, flops)
    own_maxima = _Maxima(
        len(plan),
        max(lengths, default=0),
        max((sum(lengths[i] for i in unit) for unit in units), default=0),
        -len(lengths),
        -min(lengths, default=1),
    )
    faults = [trained_first_token(batch), *find_image_fault(batch, image_layout).numbers()]
    rows = collectives.gather_rows([*own_sums, *own_maxima, *faults], device, group)
    num_sums = len(own_sums)
    sums = _Sums(*collectives.column_sums([row[:num_sums] for row in rows]))
    maxima = _Maxima(*collectives.column_maxima([row[num_sums : -len(faults)] for row in rows]))
    _check(maxima, [row[-len(faults) :] for row in rows], max_tokens, rotary_limit)
    num_micro = int(maxima.num_micro_batches)
    if num_micro > len(plan):
        plan = plan_micro_batches(lengths, max_tokens, num_micro, costs=costs, units=units)
    # Fillers run first: the last micro-batch, which reduces gradients, is a real one.
    fillers = [filler(batch) for _ in range(num_micro - len(plan))]
    return Preparation(
        GlobalCounts(
            int(sums.num_trained_tokens),
            int(sums.num_trained_sequences),
            int(sums.num_trained_units),
        ),
        StepWork(int(sums.num_tokens), sums.model_flops or None, sums.hardware_flops or None),
        fillers + cut(batch, plan),
    )


class _Sums(NamedTuple):
    """Numbers that are summed over ranks."""

    num_trained_tokens: float
    num_trained_sequences: float
    num_trained_units: float
    num_tokens: float
    model_flops: float
    hardware_flops: float


class _Maxima(NamedTuple):
    """Numbers whose maximum over ranks is taken; minima are maxima of negatives."""

    num_micro_batches: float
    longest: float
    largest_unit: float
    minus_fewest_sequences: float
    minus_shortest: float


def _sums_of(batch: TokenBatch, flops: TrainingFlops | None) -> _Sums:
    counts = loss_counts(batch)
    if flops is None:
        return _Sums(*counts, batch.num_tokens, 0.0, 0.0)
    lengths = batch.lengths_B.tolist()
    return _Sums(
        *counts,
        batch.num_tokens,
        flops.model_flops(lengths, counts[0]),
        flops.hardware_flops(lengths, counts[0]),
    )


def _check(
    maxima: _Maxima, faults: list[list[float]], max_tokens: int, rotary_limit: int | None
) -> None:
    """Raise, on all ranks alike, the fault of any rank's batch."""
    if maxima.minus_fewest_sequences == 0:
        raise EngineError(f"a rank has no sequence; give each of {len(faults)} ranks one or more")
    if maxima.minus_shortest == 0:
        raise EngineError("a sequence has no token")
    for rank, (sequence, *_) in enumerate(faults):
        if sequence >= 0:
            raise EngineError(
                f"loss_mask: sequence {int(sequence)} of data-parallel rank {rank} has its first "
                "token in it; need 0 there, for nothing predicts that token; set it to 0"
            )
    raise_image_fault([numbers for _, *numbers in faults])
    if maxima.largest_unit > max_tokens:
        alone = maxima.largest_unit == maxima.longest
        what = "the longest sequence" if alone else "sequences that stay together"
        raise ConfigError(
            "training.max_tokens_per_micro_batch",
            f"got {max_tokens}; need at least {int(maxima.largest_unit)}, {what}; raise it",
        )
    if rotary_limit is not None and maxima.longest > rotary_limit:
        raise ConfigError(
            "model.path",
            f"its rotary embeddings compute a micro-batch otherwise when a sequence exceeds "
            f"{rotary_limit} tokens; got {int(maxima.longest)}; set model.max_length to "
            f"{rotary_limit} or less",
        )
