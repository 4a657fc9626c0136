"""Cuts one rank's batch into micro-batches under a token budget.

Deterministic; only a single unit (sequences that stay together) may exceed the budget. Sequences
are sorted by length, which makes packed attention cheap. The smallest number of micro-batches is
not guaranteed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.training.step.balance import balanced_partition, fewest_parts
from engines.types import TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch that goes through the model at once.

    Attributes:
        token_index_T: int64 places of its tokens in the whole batch; None for a filler, whose
            outputs are dropped.
    """

    batch: TokenBatch
    token_index_T: Tensor | None


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
        costs: of each sequence in any unit; None balances tokens.
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
    num = min(max(min_num, fewest_parts(sizes, max_tokens)), len(units))
    of_units = balanced_partition(unit_costs, num, sizes=sizes, max_size=max_tokens)
    parts = [sorted(i for unit in part for i in units[unit]) for part in of_units]
    parts.sort(key=lambda part: (math.fsum(costs[i] for i in part), part))
    return [sorted(part, key=lambda i: (lengths[i], i)) for part in parts]


def cut(batch: TokenBatch, plan: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Return the micro-batches of a plan."""
    return [_take(batch, sequences) for sequences in plan]


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


def _take(batch: TokenBatch, sequences: Sequence[int]) -> MicroBatch:
    if list(sequences) == list(range(batch.num_sequences)):
        device = batch.input_ids_T.device
        return MicroBatch(batch, torch.arange(batch.num_tokens, device=device))
    return MicroBatch(batch.select(sequences), batch.token_index_T(sequences))
