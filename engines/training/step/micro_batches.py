"""One rank's part of an optimizer step: micro-batches, the counts of all ranks, and their sums.

`prepare` cuts a batch under a token budget after an exchange between the ranks; `Totals` sums
losses and metrics over micro-batches.

Promises: deterministic; only a single unit (sequences that stay together) may exceed the budget.
Sequences are sorted by length, which makes packed attention cheap. All checks run after the
exchange, so that all ranks raise together and none waits in a collective.
Does not promise the smallest number of micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.errors import EngineError
from engines.training.model.image_layout import ImageFault, ImageLayout, find_image_fault
from engines.training.step.balance import balanced_partition, fewest_parts
from engines.training.step.flops import TrainingFlops
from engines.training.step.optimizer_step import StepWork
from engines.types import GlobalCounts, LossOutput, TokenBatch
from infra.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch that goes through the model at once.

    Attributes:
        token_index_T: int64 places of its tokens in the whole batch; None for a filler, whose
            outputs are dropped.
    """

    batch: TokenBatch
    token_index_T: Tensor | None


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
    flops: TrainingFlops | None,
    *,
    image_layout: ImageLayout | None,
    rotary_limit: int | None,
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
    counts = loss_counts(batch)
    own_flops = (
        (flops.model_flops(lengths, counts[0]), flops.hardware_flops(lengths, counts[0]))
        if flops is not None
        else (0.0, 0.0)
    )
    own_maxima = (
        len(plan),
        max(lengths, default=0),
        max((sum(lengths[i] for i in unit) for unit in units), default=0),
        # Minima are maxima of negatives.
        -len(lengths),
        -min(lengths, default=1),
    )
    text_only = batch.images is None and image_layout is None
    image_fault = ImageFault() if text_only else find_image_fault(batch, image_layout)
    faults = (trained_first_token(batch), *image_fault)
    own = [*counts, batch.num_tokens, *own_flops, *own_maxima, *faults]
    rows = collectives.gather_rows(own, device, group)
    trained, sequences, trained_units, num_tokens, model_flops, hardware_flops = (
        collectives.column_sums([row[:6] for row in rows])
    )
    maxima = [int(value) for value in collectives.column_maxima([row[6:11] for row in rows])]
    _check(maxima[1:], [list(map(int, row[11:])) for row in rows], max_tokens, rotary_limit)
    if maxima[0] > len(plan):
        plan = plan_micro_batches(lengths, max_tokens, maxima[0], costs=costs, units=units)
    # Fillers run first: the last micro-batch, which reduces gradients, is a real one.
    return Preparation(
        GlobalCounts(int(trained), int(sequences), int(trained_units)),
        StepWork(int(num_tokens), model_flops or None, hardware_flops or None),
        [filler(batch) for _ in range(maxima[0] - len(plan))] + cut(batch, plan),
    )


def _check(
    maxima: Sequence[int],
    faults: Sequence[Sequence[int]],
    max_tokens: int,
    rotary_limit: int | None,
) -> None:
    """Raise, on all ranks alike, the fault of any rank's batch."""
    longest, largest_unit, minus_fewest_sequences, minus_shortest = maxima
    if minus_fewest_sequences == 0:
        raise EngineError(f"a rank has no sequence; give each of {len(faults)} ranks one or more")
    if minus_shortest == 0:
        raise EngineError("a sequence has no token")
    for rank, (sequence, *numbers) in enumerate(faults):
        if sequence >= 0:
            raise EngineError(
                f"loss_mask: sequence {sequence} of data-parallel rank {rank} trains on its first "
                "token, which nothing predicts; set it to 0 there"
            )
        image_fault = ImageFault(*numbers)
        if image_fault.sequence >= 0:
            where = f"sequence {image_fault.sequence} of data-parallel rank {rank}"
            raise EngineError(f"{where} {image_fault.problem}")
    if largest_unit > max_tokens:
        what = "the longest sequence" if largest_unit == longest else "sequences that stay together"
        raise ConfigError(
            "training.max_tokens_per_micro_batch",
            f"got {max_tokens}; need at least {largest_unit}, {what}; raise it",
        )
    if rotary_limit is not None and longest > rotary_limit:
        raise ConfigError(
            "model.path",
            f"its rotary embeddings change for a whole micro-batch when a sequence exceeds "
            f"{rotary_limit} tokens; got {longest}; set model.max_length to {rotary_limit} or less",
        )


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    min_num: int = 1,
    *,
    costs: Sequence[float] | None = None,
    units: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Assign sequences to micro-batches of nearly equal cost.

    Args:
        min_num: minimum number of micro-batches, as far as there are sequences.
        costs: one for each sequence, in any unit; None balances tokens.
        units: sequences that stay together; None: each is its own unit.

    Returns:
        For each micro-batch its sequence indices, shortest sequence first; micro-batches by
        ascending cost, so that ranks run similar ones together.
    """
    if not lengths:
        return []
    costs = lengths if costs is None else costs
    units = [[i] for i in range(len(lengths))] if units is None else units
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    unit_costs = [sum(costs[i] for i in unit) for unit in units]
    num_parts = min(max(min_num, fewest_parts(sizes, max_tokens)), len(units))
    of_units = balanced_partition(unit_costs, num_parts, sizes=sizes, max_size=max_tokens)
    parts = [sorted(i for unit in part for i in units[unit]) for part in of_units]
    parts.sort(key=lambda part: (math.fsum(costs[i] for i in part), part))
    return [sorted(part, key=lambda i: (lengths[i], i)) for part in parts]


def cut(batch: TokenBatch, plan: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Return the micro-batches of a plan; one that is the whole batch is not copied."""
    if [list(part) for part in plan] == [list(range(batch.num_sequences))]:
        return [MicroBatch(batch, torch.arange(batch.num_tokens, device=batch.input_ids_T.device))]
    return [MicroBatch(batch.select(part), batch.token_index_T(part)) for part in plan]


def filler(batch: TokenBatch) -> MicroBatch:
    """Return a micro-batch that trains on nothing: the shortest unit with a zero loss mask.

    Ranks have to run equally many micro-batches because each involves collectives; a rank with too
    few sequences runs fillers.
    """
    return MicroBatch(untrained(batch.select(shortest_unit(batch))), None)


def shortest_unit(batch: TokenBatch) -> list[int]:
    """Return the sequences of the unit with the fewest tokens."""
    lengths = batch.lengths_B.tolist()
    return min(batch.units, key=lambda unit: sum(lengths[i] for i in unit))


def untrained(batch: TokenBatch) -> TokenBatch:
    """Return the same batch with its loss mask at 0."""
    mask = torch.zeros(batch.num_tokens, dtype=torch.float32, device=batch.input_ids_T.device)
    return batch.with_columns(loss_mask=mask)


def loss_counts(batch: TokenBatch) -> tuple[int, int, int]:
    """Return the numbers of trained tokens, and of sequences and units that have one."""
    mask_T = batch.columns.get("loss_mask")
    if mask_T is None:
        return 0, 0, 0
    cumulative = torch.cat([torch.zeros(1, dtype=torch.int64), (mask_T != 0).cumsum(0).cpu()])
    trained_B = cumulative[batch.cu_seqlens.to(torch.int64).cpu()].diff() > 0
    num_sequences = int(trained_B.sum())
    if batch.unit_B is None:
        return int(cumulative[-1]), num_sequences, num_sequences
    return int(cumulative[-1]), num_sequences, len(batch.unit_B.cpu()[trained_B].unique())


def trained_first_token(batch: TokenBatch) -> int:
    """Return the first sequence whose first token, which has no prediction, is trained, or -1."""
    mask_T = batch.columns.get("loss_mask")
    if mask_T is None:
        return -1
    starts_B = batch.cu_seqlens[:-1].to(torch.int64).clamp(max=max(batch.num_tokens - 1, 0))
    wrong_N = ((mask_T[starts_B] != 0) & (batch.lengths_B > 0)).nonzero()
    return int(wrong_N[0]) if len(wrong_N) else -1


class Totals:
    """Sums and maxima over micro-batches, kept on the device until one exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, output: LossOutput) -> None:
        """Add one micro-batch."""
        self._loss += output.loss.detach()
        for name, value in output.metrics.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in output.maxima.items():
            value = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[float, dict[str, float], list[int]]:
        """Return the loss, the metrics, and the group ranks whose own loss is not finite."""
        own_sums, own_maxima = sorted(self._sums.items()), sorted(self._maxima.items())
        own = [self._loss, *(value for _, value in own_sums + own_maxima)]
        rows = collectives.gather_rows(torch.stack(own), self._device, group)
        split = 1 + len(own_sums)
        loss, *sums = collectives.column_sums([row[:split] for row in rows])
        maxima = collectives.column_maxima([row[split:] for row in rows])
        names = [name for name, _ in own_sums + own_maxima]
        spoiled = [place for place, row in enumerate(rows) if not math.isfinite(row[0])]
        return loss, dict(zip(names, [*sums, *maxima], strict=True)), spoiled
