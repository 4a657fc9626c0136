"""A worker group of one rank in the caller's process: no Ray, and a debugger works.

Errors of the worker reach the caller unchanged.
"""

from collections.abc import Callable
from typing import Any, Concatenate, Protocol

from engines.controller.dispatch import dispatch_mode
from engines.controller.worker_group import P, R
from engines.types import TokenBatch


class Closable(Protocol):
    """What a group needs of its worker besides the methods it calls."""

    def close(self) -> None:
        """Free everything."""
        ...


class InProcessGroup:
    """A `WorkerGroup` of world size 1: every dispatch mode is a plain call.

    `reserved` holds cluster resources for the worker; it is closed after the worker.
    """

    def __init__(self, worker: Closable, reserved: Closable | None = None) -> None:
        self._worker: Closable | None = worker
        self._reserved = reserved

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

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
        """Close the worker once."""
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                worker.close()
        finally:
            if self._reserved is not None:
                self._reserved.close()
