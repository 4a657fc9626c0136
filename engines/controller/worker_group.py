"""The one interface through which a trainer reaches its workers, however many there are.

    loss = workers.run(ModelWorker.train, batch, loss_fn)

The method itself is passed, not its name: the types of arguments and result are checked, and
`@dispatch` on the method says how the call is spread. `InProcessGroup` is one rank in the
caller's process; `ray_group.RayWorkerGroup` is many, each a Ray actor.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from engines.types import TokenBatch

P = ParamSpec("P")
R = TypeVar("R")


class WorkerGroup(Protocol):
    """A group of equal workers."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def run(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a `@dispatch` method on the group.

        Args:
            method: of the worker's class, unbound.
            *args: its arguments; `SPLIT` cuts the first one.
            **kwargs: its keyword arguments.

        Returns:
            The collected result.

        Raises:
            WorkerError: a rank died or did not answer before its deadline.
        """
        ...

    def place(self, batch: TokenBatch) -> TokenBatch:
        """Put a batch where the ranks of this node read it, so that the node holds it once.

        Args:
            batch: on the CPU.

        Returns:
            The same batch. Its ids and columns may lie in memory that is read-only: who writes
            there ends the process; write to a copy.

        Raises:
            DeadlineError: the memory could not be had in time.
        """
        ...

    def close(self) -> None:
        """End every worker; harmless when repeated."""
        ...
