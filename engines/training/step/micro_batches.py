"""Cut one rank's batch into micro-batches under a token budget.

Promises: deterministic; every sequence is in exactly one micro-batch; no micro-batch exceeds the
budget unless it is a single unit (a sequence, where none belong together); costs are as nearly
equal as `balanced_partition` makes them; sequences stand shortest first, and equal lengths
together, which is what makes packed attention cheap. Does not promise the smallest possible number
of micro-batches.
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
        batch: its sequences.
        token_index_T: (T,) int64 places of its tokens in the batch it was cut from; None for a
            filler, whose outputs count nowhere.
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
        lengths: tokens of each sequence.
        max_tokens: budget of one micro-batch.
        min_num: make at least so many, as far as there are sequences.
        costs: of each sequence, in any measure, such as `ModelFlops.sequence_costs`; None balances
            tokens.
        units: sequences that stay together; None: each stands alone.

    Returns:
        For each micro-batch its sequence indices, shortest sequence first; micro-batches from the
        cheapest to the costliest, so that ranks with equally many meet with those of like cost.
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
    """The micro-batches of a plan."""
    return [_take(batch, sequences) for sequences in plan]


def filler(batch: TokenBatch) -> MicroBatch:
    """A micro-batch that trains on nothing: the shortest unit with its loss mask at 0.

    Ranks must run equally many micro-batches, for each is a set of collectives; a rank with
    too few sequences runs fillers.
    """
    return MicroBatch(untrained(batch.select(shortest_unit(batch))), None)


def shortest_unit(batch: TokenBatch) -> list[int]:
    """The sequences of the unit with the fewest tokens, the first of several."""
    lengths = batch.lengths_B.tolist()
    return min(batch.units, key=lambda unit: sum(lengths[i] for i in unit))


def untrained(batch: TokenBatch) -> TokenBatch:
    """The same batch with its loss mask at 0."""
    mask = torch.zeros(batch.num_tokens, dtype=torch.float32, device=batch.input_ids_T.device)
    return batch.with_columns(loss_mask=mask)


def _take(batch: TokenBatch, sequences: Sequence[int]) -> MicroBatch:
    if list(sequences) == list(range(batch.num_sequences)):
        device = batch.input_ids_T.device
        return MicroBatch(batch, torch.arange(batch.num_tokens, device=device))
    return MicroBatch(batch.select(sequences), batch.token_index_T(sequences))
