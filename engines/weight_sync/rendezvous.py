"""Rendezvous of a weight transfer's sender and receivers, which also reports failures to all.

Promises: a process that waits here ends at its deadline, or with the message of the first process
that gave up. A random token keeps transfers apart; it is no protection from a process that can list
the store's keys.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engines.checksum import ChecksumMethod, method_on
from engines.collectives import connect_store, open_store
from engines.errors import WeightSyncError
from engines.weight_sync.base import ReceiverGoneError, first_of_each
from engines.weight_sync.buckets import BUCKET_BYTES
from infra.errors import DeadlineError, PipelineError

POLL_S = 0.001
WATCH_S = 0.05
"""Interval between two checks for failures."""
FAILED = "failed"
GRACE_S = 30.0
"""Added to a timeout that has to fire after another, whose error names the cause."""
SENDER_GAVE_UP = "the trainer gave up while it sent weights"


@dataclass(frozen=True)
class RendezvousTransport:
    """A `Delivery` through a rendezvous; plain data except the store, which is not pickled.

    Receivers hold weights in `dtype`, except `float32_names`. Each side has two buckets of
    `bucket_bytes` as extra memory, or see `delta`. `server` is None outside the store's process.
    """

    source_type: ClassVar[type["RendezvousSource"]]

    dtype: str
    float32_names: frozenset[str]
    bucket_bytes: int
    sources: tuple["RendezvousSource", ...]
    server: TCPStore | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}

    @classmethod
    def open(
        cls,
        dtype: str,
        float32_names: Collection[str],
        timeout_s: float,
        host: str,
        num_workers: Sequence[int],
        *,
        num_senders: int = 1,
        backend: str = "gloo",
        device_name: str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        server: TCPStore | None = None,
        delta_sync: bool = False,
    ) -> Self:
        """Return a transport whose store is served by this process at `host`, reachable by all.

        `num_workers` has one number per receiver; `num_senders` ranks may send. Transfers with the
        same `server`, a store at `host`, keep their communicator, and with `delta_sync` the buckets
        to which the next transfer sends the difference. None: a store for this transfer.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        num_readers = sum(num_workers)
        server = server or open_store(num_readers + num_senders, timeout_s, host)
        token = secrets.token_hex(16)
        source = cls.source_type(
            host, server.port, token, 0, num_readers, timeout_s, backend, device_name, delta_sync
        )
        sources = tuple(source.of_worker(first) for first in first_of_each(num_workers))
        return cls(dtype, frozenset(float32_names), bucket_bytes, sources, server)

    def stop(self) -> None:
        """See `Delivery`."""
        if self.server is None:
            return
        store = PrefixStore(self.sources[0].token, self.server)
        try:
            store.compare_set(FAILED, "", SENDER_GAVE_UP)
        except RuntimeError as error:
            raise WeightSyncError(f"the weight transfer's store is gone: {error}") from error


@dataclass(frozen=True)
class RendezvousSource(ABC):
    """A `WeightSource` that is read through a rendezvous; plain data.

    Workers of one receiver have consecutive numbers `reader`. `timeout_s` limits the wait for a
    bucket, `device_name` is the torch device type of the buckets.
    """

    host: str
    port: int
    token: str
    reader: int
    num_readers: int
    timeout_s: float
    backend: str
    device_name: str
    delta_sync: bool = False

    @property
    def checksum_method(self) -> ChecksumMethod:
        """See `WeightSource`; the buckets of both ends are on the same type of device."""
        return method_on(self.device_name)

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""

    def of_worker(self, worker: int) -> Self:
        """See `WeightSource`."""
        return replace(self, reader=self.reader + worker)

    def join(self, error: type[WeightSyncError] = WeightSyncError) -> "Rendezvous":
        """Join the rendezvous; raise `error` if it is over; senders pass `ReceiverGoneError`."""
        try:
            store, address = connect_store(self.host, self.port)
        except (OSError, RuntimeError) as problem:
            what = f"the transfer of weights at {self.host}:{self.port} is over"
            raise error(f"{what}: {first_line(problem)}") from problem
        return Rendezvous(self, address, error, PrefixStore(self.token, store))


@dataclass(frozen=True)
class Rendezvous:
    """One process's view of the rendezvous; raises `error` when a process gave up.

    As a context manager it reports a failure of the block to the other processes.
    `address` is this machine's address as seen from the store's host.
    """

    source: RendezvousSource
    address: str
    error: type[WeightSyncError]
    store: Store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Report the block's failure to the other processes; only the first report counts."""
        if error is None:
            return
        is_sender = self.error is ReceiverGoneError
        who = "the trainer" if is_sender else f"rollout engine {self.source.reader}"
        text = SENDER_GAVE_UP if is_sender else f"{who} gave up while it took weights"
        if isinstance(error, PipelineError):
            text = f"{who}: {error}"
        with self._reached():
            self.store.compare_set(FAILED, "", text)

    def say(self, key: str, text: str = "") -> None:
        """Set a key that the other processes wait for."""
        with self._reached():
            self.store.set(key, text)

    def announce(self) -> None:
        """Announce this reader to the sender; a second call raises WeightSyncError."""
        reader = self.source.reader
        with self._reached():
            times = self.store.add(f"reader {reader}", 1)
        if times > 1:
            raise WeightSyncError(f"weights for rollout engine {reader} are read twice")

    def check(self) -> None:
        """Raise the error if any process gave up."""
        with self._reached():
            found = self.store.check([FAILED]) and self.store.get(FAILED).decode()
        if found:
            raise self.error(found)

    def wait(self, key: str, what: str, timeout_s: float) -> str:
        """Return the text of a key once it is set; `what` names it in the error text.

        Raises:
            WeightSyncError: a process gave up; of the class `error`.
            DeadlineError: the key was not set within `timeout_s`.
        """
        start = checked_at = time.monotonic()
        while True:
            with self._reached():
                if self.store.check([key]):
                    return self.store.get(key).decode()
            now = time.monotonic()
            if now > checked_at + WATCH_S:
                self.check()
                checked_at = now
            if now > start + timeout_s:
                raise DeadlineError(what, timeout_s)
            time.sleep(POLL_S)

    def await_readers(self, key: str, to: str) -> list[str]:
        """Return the text of every reader's key; `to` says in error texts what a reader must do."""
        timeout_s = self.source.timeout_s
        return [
            self.wait(f"{key} {reader}", f"rollout engine {reader} to {to}", timeout_s)
            for reader in range(self.source.num_readers)
        ]

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raise `error` in place of torch's RuntimeError if the store is gone."""
        try:
            yield
        except RuntimeError as error:
            raise self.error(f"the store of the transfer is gone: {first_line(error)}") from error


def first_line(error: object) -> str:
    """Return an error's message without torch's stack trace."""
    return str(error).partition("\n")[0]
