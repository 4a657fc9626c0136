"""What runs inside the process of one rank of a `RayWorkerGroup`.

It sets threads, joins the process group, builds the worker and passes calls on to it. Its log
file holds the worker's log and, should the process crash, the Python stack of every thread.
"""

import faulthandler
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.collectives import close_process_group
from engines.controller.process_group import LOOPBACK, Rendezvous, TCPStore, join, open_store
from infra.plugins import import_external_modules
from infra.redact import RedactingFilter
from infra.redacted_output import redact_output
from infra.store.heartbeat import Heartbeat

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSettings:
    """Who this rank is.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        backend: collective backend.
        num_threads: CPU threads of this process.
        log_path: its log file.
        heartbeat_path: its heartbeat file.
        heartbeat_s: seconds between two heartbeats.
        collective_timeout_s: deadline of one collective.
    """

    rank: int
    world_size: int
    backend: str
    num_threads: int
    log_path: Path
    heartbeat_path: Path
    heartbeat_s: float
    collective_timeout_s: float


class RankProcess:
    """The class of the Ray actor. Its methods run one at a time, in the order of the calls."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        redact_output()
        self._worker: Any = None
        self._store: TCPStore | None = None
        # Line buffered and kept open: the crash handler writes to this descriptor.
        self._log = settings.log_path.open("a", buffering=1, encoding="utf-8")
        faulthandler.enable(self._log)
        handler = logging.StreamHandler(self._log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(RedactingFilter())
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        torch.set_num_threads(settings.num_threads)
        self._heartbeat = Heartbeat(settings.heartbeat_path, settings.heartbeat_s)
        self._heartbeat.__enter__()

    def started(self) -> None:
        """Answer, which takes a process that is up."""

    def open_store(self) -> Rendezvous:
        """Open the meeting place; called on rank 0 only."""
        store = open_store(self._settings.world_size, self._settings.collective_timeout_s)
        self._store = store
        return Rendezvous(LOOPBACK, store.port)

    def join(self, meeting: Rendezvous) -> None:
        """Meet the other ranks."""
        settings = self._settings
        join(
            settings.rank, settings.world_size, settings.backend, settings.collective_timeout_s,
            store=self._store, rendezvous=meeting,
        )  # fmt: skip

    def build(self, factory: Callable[[], Any]) -> int:
        """Make the worker and initialize it; returns its data-parallel place."""
        for broken in import_external_modules():
            logger.warning("%s", broken)
        # As `engines.jobs.torch_setup` does: no collection looks through what was imported. On
        # one rank it would make all the others wait.
        gc.freeze()
        self._worker = factory()
        self._worker.initialize()
        return int(self._worker.data_parallel_rank)

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the worker."""
        logging.getLogger(__name__).info("%s", name)
        return getattr(self._worker, name)(*args, **kwargs)

    def stop(self) -> None:
        """Free the worker and leave the group."""
        if self._worker is not None:
            self._worker.close()
        close_process_group()
        self._heartbeat.__exit__(None, None, None)
