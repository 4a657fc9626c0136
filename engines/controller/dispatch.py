"""How a call on a group of workers reaches its ranks, declared once on the worker's method.

A `SPLIT` call cuts its first argument over the data-parallel ranks, balanced by tokens, and
puts the results back in the original order, so the caller never learns how many ranks there
are. Ranks that share a data-parallel place (tensor or pipeline parallel) get the same share;
with `SPLIT_ALL` every rank gets a share of its own.
Does not promise: equal numbers of sequences per rank, or that every rank gets one.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from engines.errors import WorkerError
from engines.training.step.balance import balanced_partition
from engines.training.step.micro_batches import filler
from engines.types import ModelOutputs, RolloutRequest, TokenBatch

Method = TypeVar("Method", bound=Callable[..., Any])
Parts = list[list[int]]


class Dispatch(Enum):
    """What a call does with its arguments and results."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments, and every rank must come to an equal result."""
    RANK_ZERO = "rank_zero"
    """Every rank gets the same arguments; the result is rank 0's, whatever the others came to."""
    SPLIT = "split"
    """The first argument is split over the data-parallel ranks, the others are copied."""
    SPLIT_ALL = "split_all"
    """The same over all ranks: each works for itself, whatever the model's layout."""


def dispatch(mode: Dispatch) -> Callable[[Method], Method]:
    """Declare how a worker's method is called on a group."""

    def declare(method: Method) -> Method:
        vars(method)["dispatch_mode"] = mode
        return method

    return declare


def dispatch_mode(method: Callable[..., Any]) -> Dispatch:
    """The declared mode of a method.

    Args:
        method: bound or not.

    Returns:
        What `@dispatch` was given.

    Raises:
        TypeError: the method was never declared, so it is not for the group to call.
    """
    mode = getattr(method, "dispatch_mode", None)
    if not isinstance(mode, Dispatch):
        raise TypeError(f"{method!r} has no @dispatch: a group cannot call it")
    return mode


def split_plan(value: object, num_parts: int) -> Parts:
    """The items of a `TokenBatch` (its sequences) or of a list that each part takes.

    Args:
        value: what is to be split.
        num_parts: how many parts to make.

    Returns:
        For each part its item indices, ascending, with whole units of sequences; a part is empty
        when there are too few items.

    Raises:
        TypeError: the value is neither.
    """
    if isinstance(value, TokenBatch):
        lengths, units = value.lengths_B.tolist(), value.units
        sizes = [sum(lengths[i] for i in unit) for unit in units]
        parts = balanced_partition(sizes, num_parts)
        return [sorted(i for unit in part for i in units[unit]) for part in parts]
    if isinstance(value, list | tuple):
        return balanced_partition([_weight(item) for item in value], num_parts)
    raise TypeError(f"cannot split a {type(value).__name__} over ranks")


def take(value: Any, items: Sequence[int]) -> Any:
    """The named items of a `TokenBatch` or list, in that order.

    A rank without a sequence still takes part in every collective: it gets a copy of the
    shortest unit that trains on nothing, and its results are dropped by `collect`.
    """
    if not isinstance(value, TokenBatch):
        return [value[i] for i in items]
    if items:
        return value.select(items)
    return filler(value).batch


def collect(value: object, parts: Parts, results: Sequence[Any]) -> Any:
    """Undo a split on the results.

    Args:
        value: the argument that was split.
        parts: the plan it was split by.
        results: one result per part: a list with one entry per item, a per-token (T,) tensor
            of the part's tokens, `ModelOutputs` of its batch, or anything else, which must be equal
            for every part.

    Returns:
        The list, tensor or outputs in the order of `value`; anything else as every part gave it.

    Raises:
        ValueError: a part returned another number of entries than it was given.
        WorkerError: parts came to different results that are neither lists nor tensors.
    """
    first = results[0]
    if isinstance(first, ModelOutputs):
        return _collect_outputs(value, parts, results)
    if not isinstance(first, list | Tensor):
        return equal_result("a split call", "share", results)
    entries: dict[int, Any] = {}
    for items, result in zip(parts, results, strict=True):
        if not items:
            continue
        pieces = result
        if isinstance(result, Tensor):
            if not isinstance(value, TokenBatch):
                raise ValueError("a tensor came back for something that has no tokens")
            pieces = result.split(value.lengths_B[items].tolist())
        entries.update(zip(items, pieces, strict=True))
    ordered = [entries[i] for i in range(len(entries))]
    return torch.cat(ordered) if isinstance(first, Tensor) else ordered


def _collect_outputs(value: object, parts: Parts, results: Sequence[ModelOutputs]) -> ModelOutputs:
    found: dict[str, Tensor | None] = {}
    for field in fields(ModelOutputs):
        own = [getattr(result, field.name) for result in results]
        if own[0] is None:
            found[field.name] = None
        elif field.name.endswith("_B"):
            found[field.name] = torch.stack(collect(value, parts, [list(rows) for rows in own]))
        else:
            found[field.name] = collect(value, parts, own)
    return ModelOutputs(**found)  # pyright: ignore[reportArgumentType]


def equal_result(call: str, place: str, results: Sequence[Any]) -> Any:
    """The one result of a call that must come out alike everywhere.

    Args:
        call: what was called, for the error line.
        place: what a result belongs to (`rank`, `share`), for the error line.
        results: one per place.

    Returns:
        The first.

    Raises:
        WorkerError: names the places whose result is another than that of place 0.
    """
    # NaN is unlike itself: a value that is NaN everywhere is for whoever reads it to judge.
    others = [
        number
        for number, result in enumerate(results)
        if result != results[0] and repr(result) != repr(results[0])
    ]
    if others:
        raise WorkerError(
            f"{call}: {place} {', '.join(map(str, others))} came to {results[others[0]]!r:.300}, "
            f"{place} 0 to {results[0]!r:.300}; need equal results: what they hold has diverged"
        )
    return results[0]


def _weight(item: object) -> int:
    """Tokens a request may cost; 1 for anything else."""
    if isinstance(item, RolloutRequest):
        return len(item.prompt_ids) + item.num_samples * item.sampling.max_new_tokens
    return 1
