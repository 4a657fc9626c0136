"""Run collectives in a thread of their own, so that a missing process cannot block the caller.

Promises: the caller waits at most until its deadline and stops when any process gave up. The thread
and its process group end with the collective that is running, at the latest at the group's timeout.
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
    """A worker thread that exchanges items with its caller; `errand` calls `next` and `bring`."""

    def __init__(
        self, meeting: Meeting, errand: Callable[["Courier[Given, Brought]"], None]
    ) -> None:
        self._meeting, self._errand = meeting, errand
        self._given: queue.SimpleQueue[Given | None] = queue.SimpleQueue()
        self._brought: queue.SimpleQueue[Brought | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def give(self, item: Given) -> None:
        """Pass an item to the thread."""
        self._given.put(item)

    def leave(self) -> None:
        """Tell the thread to end."""
        self._given.put(None)

    def take(self, what: str, timeout_s: float) -> Brought:
        """Return the next item that the thread brings; `what` names it in the error text.

        Raises:
            WeightSyncError: a process gave up, or the collective failed.
            DeadlineError: nothing came within `timeout_s`.
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
                self._meeting.check()  # that process's own error says more than a broken connection
                raise item
            return item

    def next(self) -> Given | None:
        """Return the caller's next item, None once it left; called in the thread."""
        return self._given.get()

    def bring(self, item: Brought) -> None:
        """Pass an item to the caller; called in the thread."""
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
    """Process group in which process 0 broadcasts; independent of the default process group.

    All its processes construct it together, or get a RuntimeError. `backend` may be registered by a
    package; `address` is where the others reach this machine; `timeout_s` limits each collective.
    """

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, address: str, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if backend == "gloo":
            gloo: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            gloo._timeout = timeout
            # By default the interface follows from the host name or an environment variable.
            gloo._devices = [ProcessGroupGloo.create_device(hostname=address)]
            self._group = ProcessGroupGloo(store, rank, size, gloo)
        elif backend == "nccl":
            # Exists only in device builds of torch.
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = ProcessGroupNCCL(store, rank, size, nccl)
        else:
            self._group = _registered(backend, store, rank, size, timeout)

    def broadcast(self, memory: Tensor) -> None:
        """Broadcast bytes of process 0 into memory of equal size elsewhere; blocks until done."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([memory], options).wait()
        settle(memory)  # on a device `wait` blocks only the stream


def settle(memory: Tensor) -> None:
    """Wait until all work queued on this memory's device is done."""
    if memory.device.type != "cpu":
        torch.accelerator.synchronize(memory.device)


def _registered(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    plugin = distributed_c10d.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, "weights"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)
