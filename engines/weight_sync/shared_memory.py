"""Passes weights from a trainer to rollout engines in other processes of its machine.

Two buckets of shared memory are used in turn. A small file that appears when a bucket is full
describes it; the bucket is free when every receiver has created a file for it.
Promises: if one side fails or does not come, the others end with an error by the deadline. Memory
of a killed sender is freed by the next in its pid namespace. Device tensors are copied to the host.
"""

import itertools
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

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
)
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
    num_workers: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
) -> "SharedMemoryTransport":
    """Return a transport with its own directory; removes directories of killed processes."""
    # Containers may share memory but not process ids.
    own_namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    for left in SHARED_MEMORY.glob(f"{PREFIX}*"):
        namespace, process, _ = left.name.removeprefix(PREFIX).split("-")
        if namespace == own_namespace and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)
    directory = SHARED_MEMORY / f"{PREFIX}{own_namespace}-{os.getpid()}-{secrets.token_hex(8)}"
    directory.mkdir(mode=0o700)
    return SharedMemoryTransport(
        dtype, float32_names, tuple(num_workers), timeout_s, bucket_bytes, directory
    )


@dataclass(frozen=True)
class SharedMemoryTransport:
    """Transport through shared memory; plain data, so that it can be sent to the sending rank.

    `num_workers` has one number per receiver. A tensor larger than `bucket_bytes` enlarges its
    bucket.
    """

    dtype: str
    float32_names: frozenset[str]
    num_workers: tuple[int, ...]
    timeout_s: float
    bucket_bytes: int
    directory: Path

    @property
    def sources(self) -> "tuple[SharedMemorySource, ...]":
        """See `Transport`."""
        return tuple(
            SharedMemorySource(self.directory, first, self.timeout_s)
            for first in first_of_each(self.num_workers)
        )

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> WeightDigest:
        """See `Transport`; rank 0 sends, the other ranks only compute the digest."""
        stream = CastStream(tensors, getattr(torch, self.dtype), self.float32_names)
        with in_step(stream), ExitStack() as failed:
            if rank() == 0:
                failed.callback(self.stop)
                self._write(stream)
                failed.pop_all()
        return stream.sent

    def stop(self) -> None:
        """See `Transport`; removes the directory."""
        _mark_failed(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def await_readers(self, key: str, what: str) -> None:
        """Wait for the file `key` of every reader; `what` completes the error text."""
        end = time.monotonic() + self.timeout_s
        gone = ReceiverGoneError("a rollout engine gave up while it took weights")
        for reader in range(sum(self.num_workers)):
            late = DeadlineError(f"rollout engine {reader} to {what}", self.timeout_s)
            _await_file(self.directory / f"{key}-{reader}", end, late, gone)

    def _write(self, stream: CastStream) -> None:
        self.await_readers("reader", "come")
        writer = _Writer(self)
        packer = Packer(self.bucket_bytes, writer.open_bucket, writer.publish)
        for name, tensor in stream:
            packer.add(name, tensor)
        packer.flush()
        writer.publish([])
        writer.await_read()


@dataclass(frozen=True)
class SharedMemorySource:
    """Source that reads shared memory; workers of one receiver have consecutive `reader`s."""

    directory: Path
    reader: int
    timeout_s: float

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`; a tensor is a view of a bucket, valid until the next one."""
        gone = WeightSyncError("the trainer gave up while it sent weights")
        late = DeadlineError("the trainer to send weights", self.timeout_s)
        with ExitStack() as failed:
            failed.callback(_mark_failed, self.directory)
            try:
                (self.directory / f"reader-{self.reader}").touch()
                buckets = _Buckets(self.directory)
                for number in itertools.count():
                    message = self.directory / f"{number}.json"
                    _await_file(message, time.monotonic() + self.timeout_s, late, gone)
                    entries = entries_from_json(message.read_text(encoding="utf-8"))
                    if not entries:
                        break
                    memory = buckets.memory(number)
                    for entry in entries:
                        yield entry.name, entry.view(memory)
                    fault("weights.bucket_read")
                    (self.directory / f"{number}.read-{self.reader}").touch()
            except FileNotFoundError as error:
                raise gone from error
            failed.pop_all()

    def of_worker(self, worker: int) -> "SharedMemorySource":
        """See `WeightSource`."""
        return replace(self, reader=self.reader + worker)


class _Writer:
    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = transport
        self._buckets = _Buckets(transport.directory)
        self._number = 0

    def open_bucket(self, num_bytes: int) -> Tensor:
        """Wait until the bucket before the last one was read, and return its memory."""
        self.await_read()
        return self._buckets.memory(self._number, num_bytes)

    def await_read(self) -> None:
        """Wait until the bucket before the last one was read."""
        if self._number > 1:
            self._transport.await_readers(f"{self._number - 2}.read", "read on")

    def publish(self, entries: Sequence[Entry]) -> None:
        """Describe the next bucket; no entries mean the end."""
        message = self._transport.directory / f"{self._number}.json"
        draft = message.with_suffix(".draft")
        draft.write_text(entries_to_json(entries), "utf-8")
        draft.rename(message)
        self._number += 1


class _Buckets:
    """The two bucket files, mapped again only when their size changes."""

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / "bucket-0", directory / "bucket-1")
        self._mapped: dict[int, Tensor] = {}

    def memory(self, number: int, num_bytes: int = 0) -> Tensor:
        """Return all bytes of a bucket, (N,) uint8; `num_bytes` > 0 creates or enlarges it."""
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


def _await_file(path: Path, end: float, late: DeadlineError, gone: WeightSyncError) -> None:
    """Wait for a file of a transfer until `end`; raise `gone` if the other side gave up."""
    while not path.exists():
        if (path.parent / FAILED).exists() or not path.parent.exists():
            raise gone
        if time.monotonic() > end:
            raise late
        time.sleep(POLL_S)


def _mark_failed(directory: Path) -> None:
    with suppress(FileNotFoundError):  # removed: receivers treat that as a failure too
        (directory / FAILED).touch()
