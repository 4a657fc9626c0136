"""What the ranks agree on before a step: counts, and how many micro-batches each runs.

Promises: everything that may be wrong with a batch is checked after the exchange, so that all
ranks raise together and none is left waiting in a collective.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from engines import collectives
from engines.errors import EngineError
from engines.training.flops import ModelFlops
from engines.training.image_layout import (
    NUM_FAULT_NUMBERS,
    ImageLayout,
    find_image_fault,
    raise_image_fault,
)
from engines.training.meter import StepWork
from engines.training.micro_batches import MicroBatch, cut, filler, plan_micro_batches
from engines.training.totals import loss_counts
from engines.types import GlobalCounts, TokenBatch
from infra.errors import ConfigError


@dataclass(frozen=True)
class Preparation:
    """A rank's part of a step.

    Attributes:
        counts: denominators over all ranks.
        work: tokens and operations of all ranks.
        micro_batches: equally many on every rank; fillers come first.
    """

    counts: GlobalCounts
    work: StepWork
    micro_batches: list[MicroBatch]


def prepare(
    batch: TokenBatch,
    max_tokens: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    flops: ModelFlops | None = None,
    *,
    recomputes_layers: bool = False,
    image_layout: ImageLayout | None = None,
) -> Preparation:
    """Cut this rank's batch into as many micro-batches as every other rank's.

    Args:
        batch: this rank's share, on the CPU.
        max_tokens: budget of one micro-batch.
        device: where the exchange runs.
        group: data-parallel ranks.
        flops: of the model; balances micro-batches by operations instead of tokens.
        recomputes_layers: activations are not kept for the backward pass.
        image_layout: how the model wants images; None is a model that sees none.

    Returns:
        The preparation.

    Raises:
        EngineError: a rank has no sequence, or a sequence no token or images that do not fit.
        ConfigError: a sequence exceeds the budget.
    """
    lengths = batch.lengths_B.tolist()
    costs = flops.sequence_costs(lengths) if flops is not None else None
    plan = plan_micro_batches(lengths, max_tokens, costs=costs)
    counts = loss_counts(batch)
    own_flops = (
        (
            flops.train_flops(lengths, counts[0]),
            flops.hardware_train_flops(lengths, counts[0], layers_recomputed=recomputes_layers),
        )
        if flops is not None
        else (0.0, 0.0)
    )
    sums = [*counts, batch.num_tokens, *own_flops]
    maxima = [len(plan), max(lengths, default=0), -len(lengths), -min(lengths, default=1)]
    fault = find_image_fault(batch, image_layout).numbers()
    rows = collectives.gather_rows([*sums, *maxima, *fault], device, group)
    num_trained, num_sequences, num_tokens, model_flops, hardware_flops = collectives.column_sums(
        [row[: len(sums)] for row in rows]
    )
    num_micro, longest, fewest, shortest = collectives.column_maxima(
        [row[len(sums) : -NUM_FAULT_NUMBERS] for row in rows]
    )
    if fewest == 0:
        raise EngineError(f"a rank has no sequence; give each of {len(rows)} ranks one or more")
    if shortest == 0:
        raise EngineError("a sequence has no token")
    raise_image_fault([row[-NUM_FAULT_NUMBERS:] for row in rows])
    if longest > max_tokens:
        raise ConfigError(
            "training.max_tokens_per_micro_batch",
            f"got {max_tokens}; need at least {int(longest)}, the longest sequence; raise it",
        )
    if num_micro > len(plan):
        plan = plan_micro_batches(lengths, max_tokens, min_num=int(num_micro), costs=costs)
    micro_batches = cut(batch, plan)
    # A filler runs first: the last micro-batch, which reduces gradients, is a real one.
    missing = int(num_micro) - len(micro_batches)
    return Preparation(
        GlobalCounts(int(num_trained), int(num_sequences)),
        StepWork(int(num_tokens), model_flops or None, hardware_flops or None),
        [filler(batch) for _ in range(missing)] + micro_batches,
    )
