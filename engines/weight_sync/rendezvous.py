"""Rendezvous of the sender of weights and its receivers, through which they learn of failures.

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

from engines.collectives import connect_store, open_store
from engines.errors import WeightSyncError
from engines.weight_sync.base import first_of_each
from engines.weight_sync.buckets import BUCKET_BYTES
from infra.errors import DeadlineError, PipelineError

POLL_S = 0.001
WATCH_S = 0.05
"""Interval between two checks for failures."""
FAILED = "failed"
GRACE_S = 30.0
"""Added to timeouts that follow from another one, so that the one naming the cause fires first."""
TRAINER, SENT = "the trainer", "sent weights"
SENDER_GAVE_UP = f"{TRAINER} gave up while it {SENT}"


class Meeting:
    """One process's view of the meeting; raises `error` when a process gave up.

    `failures` is the store of the failure message; None uses `store`, which serves one transfer.
    """

    def __init__(
        self,
        store: Store,
        error: type[WeightSyncError] = WeightSyncError,
        failures: Store | None = None,
    ) -> None:
        self.store = store
        self.error = error
        self._failures = store if failures is None else failures

    def lane(self, number: int) -> "Meeting":
        """Return a view with its own keys; a failure reported there reaches every view."""
        return Meeting(PrefixStore(f"lane {number}", self.store), self.error, self._failures)

    def say(self, key: str, text: str = "") -> None:
        """Set a key that the other processes wait for."""
        with self._reached():
            self.store.set(key, text)

    def count(self, key: str) -> int:
        """Increment the counter of a key and return it."""
        with self._reached():
            return self.store.add(key, 1)

    def fail(self, sentence: str) -> None:
        """Report a failure; only the first report counts."""
        with self._reached():
            self._failures.compare_set(FAILED, "", sentence)

    def check(self) -> None:
        """Raise the error if any process gave up."""
        with self._reached():
            found = self._failures.check([FAILED]) and self._failures.get(FAILED).decode()
        if found:
            raise self.error(found)

    def wait(self, key: str, what: str, timeout_s: float) -> str:
        """Return the text of a key once it is set; `what` names it in the error text.

        Raises:
            WeightSyncError: a process gave up; of the class that this view was made with.
            DeadlineError: the key was not set within `timeout_s`.
        """
        start = looked_at = time.monotonic()
        while True:
            with self._reached():
                if self.store.check([key]):
                    return self.store.get(key).decode()
            now = time.monotonic()
            if now > looked_at + WATCH_S:
                self.check()
                looked_at = now
            if now > start + timeout_s:
                raise DeadlineError(what, timeout_s)
            time.sleep(POLL_S)

    @contextmanager
    def telling(self, who: str, what: str) -> Iterator[None]:
        """Report a failure of the block to the others; `what` completes "gave up while it ..."."""
        try:
            yield
        except PipelineError as error:
            self.fail(f"{who}: {error}")
            raise
        except BaseException:
            self.fail(f"{who} gave up while it {what}")
            raise

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.error(f"the store of the transfer is gone: {first_line(error)}") from error


def attend(host: str, port: int, token: str, error: type[WeightSyncError]) -> tuple[Meeting, str]:
    """Join a meeting, or raise `error` if it is over.

    Return it and this machine's address as seen from its host.
    """
    try:
        store, address = connect_store(host, port)
    except (OSError, RuntimeError) as problem:
        what = f"the transfer of weights at {host}:{port} is over: {first_line(problem)}"
        raise error(what) from problem
    return Meeting(PrefixStore(token, store), error), address


def first_line(error: BaseException) -> str:
    """Return an error's message without torch's stack trace."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class MeetingSource(ABC):
    """A `WeightSource` that is read at a meeting; plain data.

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

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""

    def of_worker(self, worker: int) -> Self:
        """See `WeightSource`."""
        return replace(self, reader=self.reader + worker)


@dataclass(frozen=True)
class MeetingTransport:
    """A `Delivery` through a meeting; plain data except the store, which is not pickled.

    Receivers hold weights in `dtype`, except `float32_names`. Each side has two buckets of
    `bucket_bytes`, which are its extra memory. `server` is None outside the store's process.
    """

    source_type: ClassVar[type[MeetingSource]]

    dtype: str
    float32_names: frozenset[str]
    bucket_bytes: int
    sources: tuple[MeetingSource, ...]
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
    ) -> Self:
        """Return a transport whose store is served by this process at `host`, reachable by all.

        `num_workers` has one number per receiver; `num_senders` ranks may send.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        num_readers = sum(num_workers)
        server = open_store(num_readers + num_senders, timeout_s, host)
        token = secrets.token_hex(16)
        sources = tuple(
            cls.source_type(
                host, server.port, token, first, num_readers, timeout_s, backend, device_name
            )
            for first in first_of_each(num_workers)
        )
        return cls(dtype, frozenset(float32_names), bucket_bytes, sources, server)

    def stop(self) -> None:
        """See `Delivery`; the store ends with this object."""
        if self.server is not None:
            Meeting(PrefixStore(self.sources[0].token, self.server)).fail(SENDER_GAVE_UP)
