"""A thread for what nobody can interrupt: collectives of a group that a process may be missing in.

Promises: the caller's own thread waits for a deadline at most, and ends when anybody gave up; what
the thread raised is raised there. Thread and group end with the collective that is under way: when
a process that is in it ends, at the latest after the group's own timeout.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
    _DistributedBackendOptions,
)
from torch.distributed import distributed_c10d

from engines.weight_sync.meeting import WATCH_S, Meeting, first_line
from infra.errors import DeadlineError, PipelineError

Given = TypeVar("Given")
Brought = TypeVar("Brought")


class Courier(Generic[Given, Brought]):
    """See the module.

    Args:
        meeting: says whether anybody gave up.
        errand: runs in the thread; takes from `next` until that is None, and calls `bring`.
    """

    def __init__(
        self, meeting: Meeting, errand: Callable[["Courier[Given, Brought]"], None]
    ) -> None:
        self._meeting, self._errand = meeting, errand
        self._given: queue.SimpleQueue[Given | None] = queue.SimpleQueue()
        self._brought: queue.SimpleQueue[Brought | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def give(self, item: Given) -> None:
        """Hand something to the thread."""
        self._given.put(item)

    def leave(self) -> None:
        """Let the thread end."""
        self._given.put(None)

    def take(self, what: str, timeout_s: float) -> Brought:
        """What the thread brings next.

        Args:
            what: is waited for, in words.
            timeout_s: how long.

        Returns:
            As it was brought.

        Raises:
            WeightSyncError: somebody gave up, or the collective failed.
            DeadlineError: nothing came.
        """
        end = time.monotonic() + timeout_s
        self._meeting.check()
        while True:
            try:
                item = self._brought.get(timeout=WATCH_S)
            except queue.Empty:
                self._meeting.check()
                if time.monotonic() > end:
                    raise DeadlineError(what, timeout_s) from None
                continue
            if isinstance(item, Exception):
                self._meeting.check()  # who gave up says more than a connection that ended
                raise item
            return item

    def next(self) -> Given | None:
        """What the caller gives next; None when it left. Of the thread."""
        return self._given.get()

    def bring(self, item: Brought) -> None:
        """Hand something to the caller. Of the thread."""
        self._brought.put(item)

    def _run(self) -> None:
        try:
            self._errand(self)
        except PipelineError as error:
            self._brought.put(error)
        except Exception as error:  # noqa: BLE001  thread boundary: raised by take()
            lost = self._meeting.error(f"a process of the broadcast is gone: {first_line(error)}")
            lost.__cause__ = error
            self._brought.put(lost)


class BroadcastGroup:
    """Process 0 and those that get what it has; beside any default group, and without one.

    All of them make it at the same time, and wait for each other.

    Args:
        backend: `gloo`, `nccl`, or a name that a package has registered with torch.
        store: where they find each other.
        rank: of this process.
        size: how many they are.
        address: of this machine, where the others reach it.
        timeout_s: of each collective.

    Raises:
        RuntimeError: one did not come.
    """

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, address: str, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if backend == "gloo":
            gloo: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            gloo._timeout = timeout
            # Else the interface would be that of the host's name, or of a variable.
            gloo._devices = [ProcessGroupGloo.create_device(hostname=address)]
            self._group = ProcessGroupGloo(store, rank, size, gloo)
        elif backend == "nccl":
            # Only in builds for devices.
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = ProcessGroupNCCL(store, rank, size, nccl)
        else:
            self._group = _registered(backend, store, rank, size, timeout)

    def broadcast(self, memory: Tensor) -> None:
        """Bring bytes of process 0 into memory of equal size on the others; returns when done."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([memory], options).wait()
        settle(memory)  # on a device `wait` has only made its stream wait


def settle(memory: Tensor) -> None:
    """Wait until everything was done that is queued for this memory's device."""
    if memory.device.type != "cpu":
        torch.accelerator.synchronize(memory.device)


def _registered(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of a backend that torch does not know by itself, made as torch makes it."""
    plugin = distributed_c10d.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, "weights"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)
