"""The process of one rank of a `RayWorkerGroup`.

It sets threads, joins the process group, builds the worker and forwards calls to it. Its log file
holds the worker's log and, after a crash, the Python stack of every thread.

Joins the ranks of a worker group into a torch.distributed process group.

The operating system chooses the store's port on the machine of rank 0, so two groups that start
together cannot collide.
"""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engines import remote_files
from engines.collectives import close_process_group, open_store
from engines.controller.placed_batches import Array, Share
from engines.controller.placement import Seat, use_interface_of
from engines.controller.process_log import log_to
from engines.remote_files import DiskAccess
from infra.plugins import import_external_modules
from infra.store.heartbeat import Heartbeat


@dataclass(frozen=True)
class Rendezvous:
    """Host and port of rank 0's store."""

    host: str
    port: int


def join(
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    *,
    store: TCPStore | None = None,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Make this process a rank of the default process group.

    Rank 0 passes its `store`, other ranks the `rendezvous`. `timeout_s` is the deadline of the
    rendezvous and of each collective.
    """
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        if rendezvous is None:
            raise ValueError("a rank needs the store of rank 0, or where to find it")
        store = TCPStore(
            rendezvous.host, rendezvous.port, world_size, is_master=False, timeout=timeout
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayGroupOptions:
    """How a group of actors is started and watched.

    Attributes:
        log_dir: where each rank writes `rank-<r>.log` and its heartbeat.
        resources: keyword arguments of `ray.remote` that reserve what one rank needs.
        sees_all_devices: True if a rank sees all devices of its node; otherwise it has one.
        timeouts_s: deadlines by method name; `call_timeout_s` is for all others.
        start_timeout_s: deadline for all ranks to start and meet, once they have their places.
        silence_s: a rank with an older heartbeat counts as dead.
    """

    world_size: int
    backend: str
    num_threads: int
    log_dir: Path
    resources: Mapping[str, Any] = field(default_factory=dict)
    sees_all_devices: bool = False
    collective_timeout_s: float = 600.0
    call_timeout_s: float = 7200.0
    timeouts_s: Mapping[str, float] = field(default_factory=dict)
    start_timeout_s: float = 180.0
    heartbeat_s: float = 1.0
    silence_s: float = 60.0

    def log_path(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.log_dir / f"rank-{rank}.log"

    def heartbeat_path(self, rank: int) -> Path:
        """Return the heartbeat file of a rank."""
        return self.log_dir / f"rank-{rank}.heartbeat"


class RankProcess:
    """Class of the Ray actor. Its methods run one at a time, in the order of the calls."""

    def __init__(
        self, seat: Seat, options: RayGroupOptions, access: DiskAccess | None = None
    ) -> None:
        rank = seat.rank
        self._seat, self._options = seat, options
        disk = remote_files.use(access)
        log_to(disk.local(options.log_path(rank)))
        self._worker: Any = None
        self._store: TCPStore | None = None
        torch.set_num_threads(options.num_threads)
        beats = options.heartbeat_path(rank)
        self._heartbeat = Heartbeat(disk.local(beats), options.heartbeat_s)
        self._heartbeat.__enter__()
        for path in (beats, options.log_path(rank)):
            disk.follow(path, options.heartbeat_s)

    def started(self) -> None:
        """Return, which shows that the process is up."""

    def open_store(self) -> Rendezvous:
        """Open the rendezvous store; called on rank 0 only."""
        host, timeout_s = self._seat.address, self._options.collective_timeout_s
        self._store = open_store(self._options.world_size, timeout_s, host)
        return Rendezvous(host, self._store.port)

    def join(self, meeting: Rendezvous) -> None:
        """Join the process group."""
        options = self._options
        logger.info("collectives over %s", use_interface_of(self._seat.address))
        join(
            self._seat.rank, options.world_size, options.backend, options.collective_timeout_s,
            store=self._store, rendezvous=meeting,
        )  # fmt: skip

    def build(self, factory: Callable[[], Any]) -> int:
        """Make and initialize the worker; return its data-parallel rank."""
        for broken in import_external_modules():
            logger.warning("%s", broken)
        # As in `engines.jobs.process.torch_setup`. A collection on one rank makes all others wait.
        gc.freeze()
        self._worker = factory()
        self._worker.initialize()
        return int(self._worker.data_parallel_rank)

    def call(self, name: str, arguments: Arguments, *arrays: Array) -> Any:
        """Call a method of the worker; a `Share` as first argument becomes a batch.

        Ray resolves the arrays before the call, so no wait with a deadline is needed here.
        """
        logger.info("%s", name)
        args, kwargs = arguments
        if args and isinstance(share := args[0], Share):
            args = (share.batch(arrays), *args[1:])
        return getattr(self._worker, name)(*args, **kwargs)

    def stop(self) -> None:
        """Free the worker and leave the process group."""
        if self._worker is not None:
            self._worker.close()
        close_process_group()
        self._heartbeat.__exit__(None, None, None)
