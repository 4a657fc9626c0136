"""Where the sender of weights and its receivers meet, and hear that one of them gave up.

Promises: whoever waits here ends when anyone gave up, with the words of the first who did; every
wait has a deadline. Keys stand behind a random token, so that two transfers never mix.
Does not keep out who reaches the store and looks for the token: it listens where Ray does.
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

from engines.errors import WeightSyncError
from engines.key_value_store import connect_store, open_store
from engines.weight_sync.base import first_of_each
from engines.weight_sync.buckets import BUCKET_BYTES
from infra.errors import DeadlineError, PipelineError

POLL_S = 0.001
WATCH_S = 0.05
"""Between two looks at whether anybody gave up."""
FAILED = "failed"
GRACE_S = 30.0
"""What only follows from another's deadline is given so much longer: that one names the cause."""
TRAINER, SENT = "the trainer", "sent weights"
SENDER_GAVE_UP = f"{TRAINER} gave up while it {SENT}"


class Meeting:
    """One process's view of the meeting.

    Args:
        store: of the transfer alone.
        error: raised when somebody gave up.
        failures: where that is said, if not in `store`.
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
        """A part of the meeting with words of its own; who gives up there does so everywhere."""
        return Meeting(PrefixStore(f"lane {number}", self.store), self.error, self._failures)

    def say(self, key: str, text: str = "") -> None:
        """Tell the others something, once."""
        with self._reached():
            self.store.set(key, text)

    def count(self, key: str) -> int:
        """How often this was asked for, this time included."""
        with self._reached():
            return self.store.add(key, 1)

    def fail(self, sentence: str) -> None:
        """Give up; the first to do so is the one that the others name."""
        with self._reached():
            self._failures.compare_set(FAILED, "", sentence)

    def check(self) -> None:
        """Raise the error if anybody gave up."""
        with self._reached():
            found = self._failures.check([FAILED]) and self._failures.get(FAILED).decode()
        if found:
            raise self.error(found)

    def wait(self, key: str, what: str, timeout_s: float) -> str:
        """What somebody says.

        Args:
            key: of it.
            what: is waited for, in words.
            timeout_s: how long.

        Returns:
            What was said.

        Raises:
            WeightSyncError: somebody gave up; of the class that this view was made with.
            DeadlineError: nobody said it.
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
        """Tell the others when the block fails.

        Args:
            who: fails, in words.
            what: it did, in words.
        """
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
    """Come to a meeting that another process opened.

    Args:
        host: of its store.
        port: as well.
        token: of the transfer.
        error: as in `Meeting`.

    Returns:
        The meeting, and this machine's address as it is seen there.

    Raises:
        WeightSyncError: it is over; of the class `error`.
    """
    try:
        store, address = connect_store(host, port)
    except (OSError, RuntimeError) as problem:
        what = f"the transfer of weights at {host}:{port} is over: {first_line(problem)}"
        raise error(what) from problem
    return Meeting(PrefixStore(token, store), error), address


def first_line(error: BaseException) -> str:
    """What torch says, without its stack."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class MeetingSource(ABC):
    """A `WeightSource` that is read at a meeting; plain data.

    Attributes:
        host: where the store of the transfer listens.
        port: as well.
        token: of the transfer.
        reader: number of this one; the workers of one receiver have numbers in a row.
        num_readers: how many there are.
        timeout_s: how long it waits for the next bucket.
        backend: of the group that broadcasts.
        device_name: torch's type of device that buckets lie on.
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
    """A `Delivery` by way of a meeting; plain data but for the store, which stays where it is.

    Attributes:
        dtype: name of the receivers' dtype (`float32`, `bfloat16`).
        float32_names: of `outgoing.received_dtype`.
        bucket_bytes: of each of the two on one side, which are its extra memory.
        sources: see `Delivery`.
        server: the store, in the process that opened it.
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
        """A transport whose receivers and senders meet at a store of this process.

        Args:
            dtype: as in the attributes.
            float32_names: as well.
            timeout_s: how long one side waits for the other.
            host: address of this machine that all of them reach.
            num_workers: of each receiver; all of them read.
            num_senders: ranks that may send.
            backend: as in `MeetingSource`.
            device_name: as in `MeetingSource`.
            bucket_bytes: as in the attributes.

        Returns:
            The transport.

        Raises:
            OSError: the address is not one of this machine.
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
