"""Prompts with answers to other prompts, on which KTO measures its reference point.

Made of a whole step, before ranks or micro-batches cut it, so that it depends on the step alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.algorithms.preference.answers import MASK
from engines.types import TokenBatch


def mismatched(batch: TokenBatch, max_length: int) -> TokenBatch:
    """Combine prompts with each other's answers (arXiv:2402.01306 sec. 4.1), in the same order.

    Each answer, good or bad, is used once, for another prompt if there is one: the result estimates
    an expectation over the answers of the step. A prompt ends before the first trained token; a
    sequence without one is unchanged. The result has only the column `loss_mask`.

    Args:
        batch: a whole step, on the CPU, with no sequence longer than `max_length`.
        max_length: a longer result loses its end, but keeps at least one token of the answer.
    """
    lengths = batch.lengths_B.tolist()
    ids, masks = batch.input_ids_T.split(lengths), batch.columns[MASK].split(lengths)
    starts = [_first_trained(mask) for mask in masks]
    prompts = [tuple(each[:start].tolist()) for each, start in zip(ids, starts, strict=True)]
    givers = _givers(prompts, [start < size for start, size in zip(starts, lengths, strict=True)])

    def exchanged(parts: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.cat([parts[i][: starts[i]], parts[j][starts[j] :]])[:max_length]
            for i, j in enumerate(givers)
        ]

    new_ids = exchanged(ids)
    ends_B = torch.tensor([0, *(each.numel() for each in new_ids)]).cumsum(0)
    columns = {MASK: torch.cat(exchanged(masks))}
    return TokenBatch(torch.cat(new_ids), ends_B.to(torch.int32), columns, batch.images)


def _first_trained(mask: Tensor) -> int:
    """Return the index of the first trained token; the length if there is none."""
    places_N = (mask > 0).nonzero().flatten()
    return int(places_N[0]) if places_N.numel() else mask.numel()


def _givers(prompts: Sequence[tuple[int, ...]], answered: Sequence[bool]) -> list[int]:
    """Return whose answer each sequence gets: sorted by prompt, rotated by the largest count.

    A smaller rotation would leave that prompt some of its own answers. If a prompt has more than
    half of all answers, no other assignment leaves it fewer.
    """
    givers = list(range(len(prompts)))
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index in givers:
        if answered[index]:
            by_prompt.setdefault(prompts[index], []).append(index)
    order = [index for indexes in by_prompt.values() for index in indexes]
    largest = max(map(len, by_prompt.values()), default=0)
    by = largest if largest < len(order) else 1
    for place, index in enumerate(order):
        givers[index] = order[(place + by) % len(order)]
    return givers
