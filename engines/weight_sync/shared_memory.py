"""Passes weights from a trainer to rollout engines in other processes of the same nodes.

Two buckets of shared memory are used in turn. A small file that appears when a bucket is full
describes it; the bucket is free when every receiver has created a file for it. On each node with
receivers one rank sends, and makes and removes the directory of these files; the process that opens
the transport may be on another node.
Promises: no weights go from node to node. If one side fails or does not come, the others end with
an error by the deadline. Memory of a killed sender is freed by its receivers, or else by the next
sender in its pid namespace. Device tensors are copied to the host.
"""

import itertools
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from engines.checksum import ChecksumMethod
from engines.collectives import rank
from engines.errors import WeightSyncError
from engines.weight_sync.base import ReceiverGoneError, WeightDigest, first_of_each
from engines.weight_sync.buckets import (
    CastStream,
    Entry,
    Packer,
    entries_from_json,
    entries_to_json,
    in_step,
    settle,
)
from engines.weight_sync.cancellation import Cancellation
from engines.weight_sync.rendezvous import GRACE_S
from infra.errors import DeadlineError
from infra.faults import fault

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  shared memory; the directory name is random
PREFIX = "rlhf-weights-"
BUCKET_BYTES = 64 * 2**20
POLL_S = 0.0005
FAILED = "failed"


def open_transport(
    dtype: str,
    float32_names: frozenset[str],
    timeout_s: float,
    host: str,
    num_workers: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
    senders: Sequence[int] = (),
) -> "SharedMemoryTransport":
    """Return a transport that this process may cancel, at an address that all its others reach."""
    return SharedMemoryTransport(
        dtype,
        float32_names,
        tuple(num_workers),
        timeout_s,
        bucket_bytes,
        secrets.token_hex(8),
        Cancellation.open(host),
        tuple(senders or [0] * len(num_workers)),
    )


@dataclass(frozen=True)
class SharedMemoryTransport:
    """Transport through shared memory; plain data, so that it can be sent to the ranks.

    `num_workers` has one number per receiver, `senders` the rank on its node that sends (rank 0 by
    default). A tensor larger than `bucket_bytes` enlarges its bucket. `token` is a part of the
    names of all directories.
    """

    dtype: str
    float32_names: frozenset[str]
    num_workers: tuple[int, ...]
    timeout_s: float
    bucket_bytes: int
    token: str
    cancellation: Cancellation
    senders: tuple[int, ...]

    @property
    def sources(self) -> "tuple[SharedMemorySource, ...]":
        """See `Transport`."""
        return tuple(map(self.source, first_of_each(self.num_workers), self.senders))

    def source(self, reader: int, sender: int) -> "SharedMemorySource":
        """Return the source of one reader; the workers of all receivers are readers."""
        host, port = self.cancellation.host, self.cancellation.port
        timeout_s = self.timeout_s
        if len(set(self.senders)) > 1:
            # Ranks wait for each other; the one whose reader is late gives up first and names it.
            timeout_s += GRACE_S
        return SharedMemorySource(host, port, self.directory_token(sender), reader, timeout_s)

    def directory_token(self, sender: int) -> str:
        """Return the end of a directory's name; containers that are two nodes may share memory."""
        return f"{self.token}.{sender}"

    def readers(self, sender: int) -> list[int]:
        """Return the readers to which a rank sends."""
        served = chain.from_iterable(map(repeat, self.senders, self.num_workers))
        return [reader for reader, rank in enumerate(served) if rank == sender]

    def buckets(self, directory: Path) -> "Buckets":
        """Return the sender's buckets of a transfer."""
        return HostBuckets(directory)

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> WeightDigest:
        """See `Transport`; one rank per node sends, the other ranks only compute the digest."""
        stream = CastStream(
            tensors,
            getattr(torch, self.dtype),
            self.float32_names,
            self.sources[0].checksum_method,
        )
        with in_step(stream):
            if self.readers(rank()):
                gone = ReceiverGoneError("a rollout engine gave up while it took weights")
                with (
                    self.cancellation.watch() as is_cancelled,
                    _own_directory(self.directory_token(rank())) as directory,
                    _present(directory, gone),
                ):
                    self._write(stream, TransferFiles(directory, is_cancelled, gone))
        return stream.sent

    def stop(self) -> None:
        """See `Transport`; does nothing in other processes than the one that opened it."""
        self.cancellation.cancel()

    def await_readers(self, files: "TransferFiles", key: str, what: str) -> None:
        """Wait for the file `key` of this rank's readers; `what` completes the error text."""
        end = time.monotonic() + self.timeout_s
        for reader in self.readers(rank()):
            late = DeadlineError(f"rollout engine {reader} to {what}", self.timeout_s)
            files.wait(f"{key}-{reader}", end, late)

    def _write(self, stream: CastStream, files: "TransferFiles") -> None:
        with closing(self.buckets(files.directory)) as buckets:
            self.await_readers(files, "reader", "come")
            writer = _Writer(self, files, buckets)
            stream.pack(Packer(self.bucket_bytes, writer.open_bucket, writer.publish))
            writer.finish()
            buckets.end()


@dataclass(frozen=True)
class SharedMemorySource:
    """Source that reads shared memory; workers of one receiver have consecutive `reader`s.

    `host` and `port` are those of the transport's `Cancellation`.
    """

    host: str
    port: int
    token: str
    reader: int
    timeout_s: float

    @property
    def checksum_method(self) -> ChecksumMethod:
        """See `WeightSource`."""
        return "xxh3"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`; a tensor is a view of a bucket, valid until the next one."""
        gone = WeightSyncError("the trainer gave up while it sent weights")
        late = DeadlineError("the trainer to send weights", self.timeout_s)
        with Cancellation(self.host, self.port).watch() as is_cancelled, ExitStack() as failed:
            directory = self._directory(is_cancelled, late, gone)
            files = TransferFiles(directory, is_cancelled, gone)
            # The sender may be dead; it also takes an absent directory for a failure.
            failed.callback(shutil.rmtree, directory, ignore_errors=True)
            failed.callback(_mark_failed, directory)
            with _present(directory, gone), closing(self.buckets(files, late)) as buckets:
                (directory / f"reader-{self.reader}").touch()
                for number in itertools.count():
                    message = files.wait(f"{number}.json", time.monotonic() + self.timeout_s, late)
                    entries = entries_from_json(message.read_text(encoding="utf-8"))
                    if entries:
                        memory = buckets.memory(number)
                        for entry in entries:
                            yield entry.name, entry.view(memory)
                        settle(memory)
                        buckets.release(number)
                        fault("weights.bucket_read")
                    else:
                        buckets.end()
                    (directory / f"{number}.read-{self.reader}").touch()
                    if not entries:
                        break
            failed.pop_all()

    def of_worker(self, worker: int) -> Self:
        """See `WeightSource`."""
        return replace(self, reader=self.reader + worker)

    def buckets(self, files: "TransferFiles", late: DeadlineError) -> "Buckets":
        """Return this reader's view of the sender's buckets."""
        return HostBuckets(files.directory)

    def _directory(
        self, is_cancelled: Callable[[], bool], late: DeadlineError, gone: WeightSyncError
    ) -> Path:
        """Wait for the sender's directory."""
        end = time.monotonic() + self.timeout_s
        while (found := next(SHARED_MEMORY.glob(f"{PREFIX}*-{self.token}"), None)) is None:
            _pause(is_cancelled, end, late, gone)
        return found


@contextmanager
def _own_directory(token: str) -> Iterator[Path]:
    """Yield a new directory of this process; first remove those of killed processes."""
    # Containers may share memory but not process ids.
    own_namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    for left in SHARED_MEMORY.glob(f"{PREFIX}*"):
        namespace, process, _ = left.name.removeprefix(PREFIX).split("-")
        if namespace == own_namespace and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)
    directory = SHARED_MEMORY / f"{PREFIX}{own_namespace}-{os.getpid()}-{token}"
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _present(directory: Path, gone: WeightSyncError) -> Iterator[None]:
    """Raise `gone` in place of an error that comes from the removal of the directory."""
    try:
        yield
    except FileNotFoundError as error:
        if directory.exists():
            raise
        raise gone from error


@dataclass(frozen=True)
class TransferFiles:
    """The files by which one side of a transfer hears of the other; `gone` if that gave up."""

    directory: Path
    is_cancelled: Callable[[], bool]
    gone: WeightSyncError

    def wait(self, name: str, end: float, late: DeadlineError) -> Path:
        """Return the path of a file once it exists; raise `late` after `end`."""
        path = self.directory / name
        while not path.exists():
            if (self.directory / FAILED).exists() or not self.directory.exists():
                raise self.gone
            _pause(self.is_cancelled, end, late, self.gone)
        return path


def _pause(
    is_cancelled: Callable[[], bool], end: float, late: DeadlineError, gone: WeightSyncError
) -> None:
    """Pause between two looks for a file."""
    if is_cancelled():
        raise gone
    if time.monotonic() > end:
        raise late
    time.sleep(POLL_S)


class Buckets:
    """One side's memory of the buckets of a transfer, which are used in turn."""

    def memory(self, number: int, num_bytes: int = 0) -> Tensor:
        """Return the bytes of bucket `number`, (N,) uint8; `num_bytes` > 0 makes it, on the sender.

        All readers have come by then, and have read the bucket before the last.
        """
        raise NotImplementedError

    def release(self, number: int) -> None:
        """End a reader's use of a bucket, before the sender hears that it was read."""

    def end(self) -> None:
        """End the use of all buckets: on a reader first, then on the sender."""

    def close(self) -> None:
        """End the use of all buckets, also if the other side may still use them."""
        self.end()


class _Writer:
    def __init__(
        self, transport: SharedMemoryTransport, files: TransferFiles, buckets: Buckets
    ) -> None:
        self._transport, self._files, self._buckets = transport, files, buckets
        self._memory = torch.empty(0)
        self._number = 0

    def open_bucket(self, num_bytes: int) -> Tensor:
        """Wait until the bucket before the last one was read, and return its memory."""
        if self._number > 1:
            self._await_read(self._number - 2)
        self._memory = self._buckets.memory(self._number, num_bytes)
        return self._memory

    def finish(self) -> None:
        """Announce the end, and wait until every reader knows it."""
        self.publish([])
        self._await_read(self._number - 1)

    def publish(self, entries: Sequence[Entry]) -> None:
        """Describe the next bucket; no entries mean the end."""
        settle(self._memory)
        message = self._files.directory / f"{self._number}.json"
        draft = message.with_suffix(".draft")
        draft.write_text(entries_to_json(entries), "utf-8")
        draft.rename(message)
        self._number += 1

    def _await_read(self, number: int) -> None:
        self._transport.await_readers(self._files, f"{number}.read", "read on")


class HostBuckets(Buckets):
    """The two bucket files, mapped again only when their size changes."""

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / "bucket-0", directory / "bucket-1")
        self._mapped: dict[int, Tensor] = {}

    def memory(self, number: int, num_bytes: int = 0) -> Tensor:
        """See `Buckets`; `num_bytes` creates a file, or enlarges one that is smaller."""
        place = number % 2
        with self._paths[place].open("a+b" if num_bytes else "r+b") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes < num_bytes:
                # Allocated here, so that full memory is an error, not SIGBUS at the first write.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                size_bytes = num_bytes
            held = self._mapped.get(place)
            if held is None or held.numel() != size_bytes:
                held = torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=torch.uint8)
                self._mapped[place] = held
        return held


def _mark_failed(directory: Path) -> None:
    with suppress(FileNotFoundError):  # removed: the others treat that as a failure too
        (directory / FAILED).touch()
