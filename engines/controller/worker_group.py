"""The interface through which a trainer calls its workers, however many there are.

    loss = workers.run(ModelWorker.train, batch, loss_fn)

The method itself is passed, not its name, so arguments and result are type-checked; `@dispatch` on
the method says how the call is distributed. `InProcessGroup` is one rank in the caller's process,
where a debugger works; `ray_group.RayWorkerGroup` is one Ray actor per rank.

A `SPLIT` call cuts its first argument over the data-parallel ranks, balanced by tokens. Ranks that
share a data-parallel place (tensor or pipeline parallel) get the same share; with `SHARD_PER_RANK`
every rank gets its own.
Promises: results of a split call come in the original order, so the caller does not need to know
the number of ranks.
Does not promise equal numbers of sequences per rank, or that every rank gets one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from engines.errors import WorkerError
from engines.training.step.balance import balanced_partition
from engines.training.step.micro_batches import filler
from engines.types import ModelOutputs, RolloutRequest, TokenBatch

P = ParamSpec("P")
R = TypeVar("R")


class WorkerGroup(ABC):
    """Calls a method on the workers of all ranks."""

    world_size: int
    """Number of ranks."""

    @abstractmethod
    def run(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a `@dispatch` method; WorkerError if a rank dies, DeadlineError if it is late."""

    @abstractmethod
    def place(self, batch: TokenBatch) -> TokenBatch:
        """Put a CPU batch where all ranks of this node read it, so that the node holds it once.

        Ids and columns of the result may be in read-only memory, where a write crashes the process.
        """

    @abstractmethod
    def close(self) -> None:
        """End every worker; may be called again."""


Method = TypeVar("Method", bound=Callable[..., Any])
Parts = list[list[int]]


class Dispatch(Enum):
    """Distribution of a call's arguments over the ranks, and the result that it returns."""

    ONE_TO_ALL = "one_to_all"
    """All ranks get the same arguments and must return equal results."""
    RANK_ZERO = "rank_zero"
    """All ranks get the same arguments; rank 0's result is returned."""
    SPLIT = "split"
    """The first argument is split over the data-parallel ranks, the others are copied."""
    SHARD_PER_RANK = "split_all"
    """Like `SPLIT`, but over all ranks."""


def dispatch(mode: Dispatch) -> Callable[[Method], Method]:
    """Declare how a worker's method is called on a group."""

    def declare(method: Method) -> Method:
        vars(method)["dispatch_mode"] = mode
        return method

    return declare


def dispatch_mode(method: Callable[..., Any]) -> Dispatch:
    """Return the declared mode of a method; raise TypeError if it has no `@dispatch`."""
    mode = getattr(method, "dispatch_mode", None)
    if not isinstance(mode, Dispatch):
        raise TypeError(f"{method!r} has no @dispatch: a group cannot call it")
    return mode


def split_plan(value: object, num_parts: int) -> Parts:
    """Return for each part the ascending indices of its items; parts may be empty.

    `value` is a `TokenBatch`, whose units stay whole, a list or a tuple; else TypeError.
    """
    if isinstance(value, TokenBatch):
        lengths, units = value.lengths_B.tolist(), value.units
        sizes = [sum(lengths[i] for i in unit) for unit in units]
        return [
            sorted(i for unit in part for i in units[unit])
            for part in balanced_partition(sizes, num_parts)
        ]
    if not isinstance(value, list | tuple):
        raise TypeError(f"cannot split a {type(value).__name__} over ranks")
    # A request weighs its maximum number of tokens.
    sizes = [
        len(item.prompt_ids) + item.num_samples * item.sampling.max_new_tokens
        if isinstance(item, RolloutRequest)
        else 1
        for item in value
    ]
    return balanced_partition(sizes, num_parts)


def take(value: Any, items: Sequence[int]) -> Any:
    """Return the given items of a `TokenBatch` or list, in that order.

    A rank without a sequence still takes part in every collective: it gets a copy of the shortest
    unit with loss mask 0, and `collect` drops its results.
    """
    if not isinstance(value, TokenBatch):
        return [value[i] for i in items]
    return value.select(items) if items else filler(value).batch


def collect(value: object, parts: Parts, results: Sequence[Any]) -> Any:
    """Join the results of a split call in the order of `value`, which `parts` split.

    A result is a list with one entry per item, a (T, ...) tensor of the part's tokens or
    `ModelOutputs`; anything else must be equal for all parts, or a WorkerError is raised.
    """
    first = results[0]
    if isinstance(first, ModelOutputs):
        columns: dict[str, Any] = {}
        for field in fields(ModelOutputs):
            own = [getattr(result, field.name) for result in results]
            if field.name.endswith("_B") and own[0] is not None:
                columns[field.name] = torch.stack(collect(value, parts, [[*each] for each in own]))
            elif own[0] is not None:
                columns[field.name] = collect(value, parts, own)
        return ModelOutputs(**columns)
    if not isinstance(first, list | Tensor):
        return equal_result("a split call", "share", results)
    if isinstance(first, Tensor) and not isinstance(value, TokenBatch):
        raise ValueError("a result is a tensor, but the value that was split has no tokens")
    entries: dict[int, Any] = {}
    for items, result in zip(parts, results, strict=True):
        if items:
            pieces = result
            if isinstance(value, TokenBatch) and isinstance(result, Tensor):
                pieces = result.split(value.lengths_B[items].tolist())
            entries.update(zip(items, pieces, strict=True))
    ordered = [entries[i] for i in range(len(entries))]
    return torch.cat(ordered) if isinstance(first, Tensor) else ordered


def equal_result(call: str, place: str, results: Sequence[Any]) -> Any:
    """Return the common result of a call; raise WorkerError with the `place`s that differ."""
    # NaN != NaN, so results are also compared by `repr`.
    others = [
        number
        for number, result in enumerate(results)
        if result != results[0] and repr(result) != repr(results[0])
    ]
    if others:
        raise WorkerError(
            f"{call}: {place} {', '.join(map(str, others))} returned {results[others[0]]!r:.300}, "
            f"{place} 0 {results[0]!r:.300}; need equal results: their states have diverged"
        )
    return results[0]


class InProcessGroup(WorkerGroup):
    """A `WorkerGroup` of world size 1: every dispatch mode is a plain call.

    Errors of the worker reach the caller unchanged. `reserved` holds cluster resources for the
    worker; it is closed after the worker.
    """

    world_size = 1

    def __init__(self, worker: Any, reserved: Any = None) -> None:
        self._worker = worker
        self._resources = ExitStack()
        if reserved is not None:
            self._resources.callback(reserved.close)
        self._resources.callback(worker.close)

    def run(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the method on the worker."""
        dispatch_mode(method)
        if self._worker is None:
            raise RuntimeError(f"{method.__name__} was called on a closed group")
        return method(self._worker, *args, **kwargs)

    def place(self, batch: TokenBatch) -> TokenBatch:
        """Return `batch`: the rank reads the caller's memory."""
        return batch

    def close(self) -> None:
        """Close the worker, then `reserved`; may be called again."""
        self._worker = None
        self._resources.close()
