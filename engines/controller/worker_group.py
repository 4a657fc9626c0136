"""The interface through which a trainer calls its workers, however many there are.

    loss = workers.run(ModelWorker.train, batch, loss_fn)

The method itself is passed, not its name, so arguments and result are type-checked; `@dispatch` on
the method says how the call is distributed. `InProcessGroup` is one rank in the caller's process,
`ray_group.RayWorkerGroup` is one Ray actor per rank.
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
        """Call a `@dispatch` method; raise WorkerError if a rank dies or misses its deadline."""
        ...

    def place(self, batch: TokenBatch) -> TokenBatch:
        """Put a CPU batch where all ranks of this node read it, so that the node holds it once.

        Ids and columns of the result may be in read-only memory, where a write crashes the process.
        """
        ...

    def close(self) -> None:
        """End every worker; may be called again."""
        ...
