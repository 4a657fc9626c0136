"""The communicator of a weight sync: one process group of all senders and all readers.

The next transfer uses it again, if all processes still hold it. Collectives run in a thread of
their own, so that a missing process cannot block the caller.
Promises: nothing is sent before every process has come. If one side fails or does not come, the
others end with an error that names it, by the deadline. A communicator is not used after a failure;
the thread ends with the collective that is running, at the latest at its timeout.
"""

import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    _DistributedBackendOptions,
)
from torch.distributed import distributed_c10d

from engines.weight_sync.buckets import settle
from engines.weight_sync.delta import DeltaBases
from engines.weight_sync.rendezvous import (
    GRACE_S,
    WATCH_S,
    Rendezvous,
    RendezvousSource,
    first_line,
)
from infra import env
from infra.errors import DeadlineError, PipelineError
from infra.waiting import in_thread

ALL_CAME = "all came"

Turns = Sequence[tuple[int, int | None]]
"""Sending ranks in order, each with its number of tensors in this turn.

None: an empty message ends the turn, which has to be the last."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def close_communicators() -> None:
    """Free the communicators that this process keeps, and what it keeps for delta sync."""
    _kept.clear()
    _bases.clear()


@contextmanager
def joined(rendezvous: Rendezvous, turns: Turns, sender: int | None) -> Iterator["Member"]:
    """Wait for all processes and agree on a communicator; forget it if the block fails.

    Bases of delta sync are used if all confirmed them. `sender` is this process's rank if it sends,
    None if it reads.
    """
    source, senders = rendezvous.source, senders_of(turns)
    number = len(senders) + source.reader if sender is None else senders.index(sender)
    seat = (source.host, source.port, number)
    if sender is None:
        # A reader has another number if others take part.
        former = [each for each in {*_kept, *_bases} if each[:2] == seat[:2] and each != seat]
        for each in former:
            if each[2] >= len(senders):
                _kept.pop(each, None)
                _bases.pop(each, None)
    # A failed block leaves no bases: they are partly those of the transfer that failed.
    bases = _bases.pop(seat, DeltaBases(source.checksum_method)) if source.delta_sync else None
    held = f"{_kept[seat][0] if seat in _kept else ''} {bases.confirmed if bases else ''}"
    if number == 0:
        agreed = _agreed(rendezvous, len(senders), held)
    else:
        rendezvous.say(f"communicator {number}", held)
        if sender is None:
            rendezvous.announce()
        # The first sender waits less long, so its error names the process that did not come.
        agreed = rendezvous.wait(
            ALL_CAME, "every rollout engine to connect", source.timeout_s + GRACE_S
        )
    if bases is not None and agreed != held:
        bases = DeltaBases(source.checksum_method)
    with ExitStack() as failed:
        failed.callback(_kept.pop, seat, None)
        yield Member(rendezvous, turns, number, _device(source), agreed.partition(" ")[0], bases)
        failed.pop_all()
    if bases is not None:
        _bases[seat] = bases


def _agreed(rendezvous: Rendezvous, num_senders: int, held: str) -> str:
    """Wait for all processes; return what each holds, or the name of a new communicator."""
    source = rendezvous.source
    size = num_senders + source.num_readers
    rendezvous.await_readers("reader", "come")
    theirs = {
        rendezvous.wait(f"communicator {number}", f"sender {number} to come", source.timeout_s)
        for number in range(1, size)
    }
    if theirs != {held} or not held.startswith(f"{size}-"):
        held = f"{size}-{secrets.token_hex(8)}"
    rendezvous.say(ALL_CAME, held)
    return held


def senders_of(turns: Turns) -> list[int]:
    """Return the sending ranks; their places are their numbers in the communicator."""
    return sorted({sender for sender, _ in turns})


@dataclass(frozen=True)
class Member:
    """A process's part in a transfer: `number` in the communicator `agreed`.

    The senders have the first numbers, in the order of their ranks, then come the readers.
    """

    rendezvous: Rendezvous
    turns: Turns
    number: int
    device: torch.device
    agreed: str
    bases: DeltaBases | None

    @property
    def patience_s(self) -> float:
        """Deadline of what has to end after the first sender, whose error names the cause."""
        return self.rendezvous.source.timeout_s + GRACE_S

    def finish(self) -> str:
        """Return the digests of the buckets that are kept for delta sync; see `DeltaBases`."""
        return "" if self.bases is None else self.bases.finish()

    def confirm(self, rebuilt: str) -> None:
        """Compare them with those of a reader; raises WeightSyncError if they differ."""
        if self.bases is not None:
            self.bases.confirm(rebuilt)

    def communicator(self) -> "BroadcastGroup":
        """Return the kept communicator, or make it together with the other members."""
        source = self.rendezvous.source
        seat = (source.host, source.port, self.number)
        if seat not in _kept or _kept[seat][0] != self.agreed:
            _kept.pop(seat, None)  # freed first
            group = BroadcastGroup(
                source.backend,
                PrefixStore(self.agreed, self.rendezvous.store),
                self.number,
                len(senders_of(self.turns)) + source.num_readers,
                self.rendezvous.address,
                self.patience_s,
            )
            _kept[seat] = self.agreed, group
        return _kept[seat][1]


class CollectiveThread(Generic[Item, Result]):
    """Runs `work` in a thread: a generator from the items of `put` to the results of `get`."""

    def __init__(
        self, rendezvous: Rendezvous, work: Callable[[Iterator[Item]], Iterator[Result]]
    ) -> None:
        self._rendezvous, self._work = rendezvous, work
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._ended = in_thread(self._run, "weights")

    def put(self, item: Item | None) -> None:
        """Pass an item to the thread; None ends it."""
        self._items.put(item)

    def get(self, what: str, timeout_s: float) -> Result:
        """Return the next result; `what` names it in the error text.

        Raises:
            WeightSyncError: a process gave up, or the collective failed.
            DeadlineError: nothing came within `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while True:
            self._rendezvous.check()
            try:
                return self._results.get(timeout=WATCH_S)
            except queue.Empty:
                if self._ended.done():
                    self._raise_failure()
                if time.monotonic() > end:
                    raise DeadlineError(what, timeout_s) from None

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread; raises as `get`."""
        wait([self._ended], timeout_s)
        if not self._ended.done():
            raise DeadlineError("the last broadcast to end", timeout_s)
        if self._ended.exception() is not None:
            self._raise_failure()

    def _run(self) -> None:
        for result in self._work(iter(self._items.get, None)):
            self._results.put(result)
            del result  # the caller may free a bucket while the next one is on its way

    def _raise_failure(self) -> NoReturn:
        self._rendezvous.check()  # that process's own error says more than a broken connection
        error = self._ended.exception()
        if isinstance(error, PipelineError):
            raise error
        is_own = isinstance(error, torch.OutOfMemoryError)
        cause = "the broadcast failed here" if is_own else "a peer of the broadcast is gone"
        raise self._rendezvous.error(f"{cause}: {first_line(error)}") from error


def _device(source: RendezvousSource) -> torch.device:
    """Return the current device of the calling thread; the collective thread has another."""
    if source.device_name == "cpu":
        return torch.device("cpu")
    return torch.device(source.device_name, torch.accelerator.current_device_index())


class BroadcastGroup:
    """Process group for broadcasts; independent of the default process group.

    All its processes construct it together, or get a RuntimeError. `backend` may be registered by a
    package; `timeout_s` limits each collective. `address` is where the others reach this machine,
    if the environment names no interface.
    """

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, address: str, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if backend == "gloo":
            gloo: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            gloo._timeout = timeout
            interfaces = env.GLOO_SOCKET_IFNAME.get()
            gloo._devices = (
                [ProcessGroupGloo.create_device(interface=each) for each in interfaces.split(",")]
                if interfaces
                # By default torch takes the interface that has the host's name.
                else [ProcessGroupGloo.create_device(hostname=address)]
            )
            self._group = ProcessGroupGloo(store, rank, size, gloo)
        elif backend == "nccl":
            # Exists only in device builds of torch.
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = ProcessGroupNCCL(store, rank, size, nccl)
        else:
            plugin = distributed_c10d.Backend._plugins[backend.upper()]
            if plugin.extended_api:
                options = _DistributedBackendOptions()
                options.store, options.group_rank, options.group_size = store, rank, size
                options.timeout, options.group_id = timeout, "weights"
                options.global_ranks_in_group = list(range(size))
                self._group = plugin.creator_fn(options, None)
            else:
                self._group = plugin.creator_fn(store, rank, size, timeout)

    def broadcast(self, memory: Tensor, root: int = 0) -> None:
        """Broadcast bytes of process `root` into memory of equal size elsewhere, until done."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([memory], options).wait()
        settle(memory)  # on a device `wait` blocks only the stream


_kept: dict[tuple[str, int, int], tuple[str, BroadcastGroup]] = {}
"""Communicators with their names, by store and number of this process in them."""
_bases: dict[tuple[str, int, int], DeltaBases] = {}
