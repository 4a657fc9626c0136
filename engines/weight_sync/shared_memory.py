"""Weights from a trainer to rollout engines in other processes of one machine.

Two buckets of shared memory are filled in turn: while the receivers read one, the sender fills
the other. A bucket is described by a small file that appears when it is full, and is free again
when every receiver has left its own beside it.
Promises: nothing is written before every receiver has come; two buckets are the whole of the
extra memory; whichever side fails, or stays away, the others end with an error by the deadline;
the memory of a sender that was killed is freed by the next one.
Does not promise speed across machines, or with tensors on a device: they are copied to the host.
"""

import mmap
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engines.collectives import rank
from engines.errors import WeightSyncError
from engines.weight_sync.base import Receipt, ReceiverGoneError, first_of_each
from engines.weight_sync.buckets import (
    Entry,
    Packer,
    entries_from_json,
    entries_to_json,
)
from engines.weight_sync.outgoing import OutgoingStream, in_step
from infra.errors import DeadlineError
from infra.faults import fault

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  memory, not a place for files to be guessed
PREFIX = "rlhf-weights-"
BUCKET_BYTES = 64 * 2**20
POLL_S = 0.0005
FAILED = "failed"


@dataclass(frozen=True)
class SharedMemorySource:
    """See `WeightSource`; plain data.

    Attributes:
        directory: of the transport.
        reader: number of this reader; the workers of one receiver have numbers in a row.
        timeout_s: how long it waits for the next bucket.
    """

    directory: Path
    reader: int
    timeout_s: float

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`; a tensor is a view of a bucket, overwritten once it was left."""
        done = False
        try:
            (self.directory / f"reader-{self.reader}").touch()
            number = 0
            buckets = _Buckets(self.directory)
            while entries := self._bucket(number):
                memory = buckets.memory(number)
                for entry in entries:
                    yield entry.name, entry.view(memory)
                fault("weights.bucket_read")
                (self.directory / f"{number}.read-{self.reader}").touch()
                number += 1
            done = True
        except FileNotFoundError as error:
            raise WeightSyncError("the trainer gave up while it sent weights") from error
        finally:
            if not done:
                _mark_failed(self.directory)

    def of_worker(self, worker: int) -> "SharedMemorySource":
        """See `WeightSource`."""
        return replace(self, reader=self.reader + worker)

    def _bucket(self, number: int) -> list[Entry]:
        """What lies in a bucket; nothing in the last one."""
        message = self.directory / f"{number}.json"
        end = time.monotonic() + self.timeout_s
        while not message.exists():
            if (self.directory / FAILED).exists() or not self.directory.exists():
                raise WeightSyncError("the trainer gave up while it sent weights")
            if time.monotonic() > end:
                raise DeadlineError("the trainer to send weights", self.timeout_s)
            time.sleep(POLL_S)
        return entries_from_json(message.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class SharedMemoryTransport:
    """See `Transport`; plain data, so that it travels to the rank that sends.

    Attributes:
        dtype: name of the receivers' dtype (`float32`, `bfloat16`).
        float32_names: of `OutgoingStream`.
        num_workers: of each receiver on this machine; all of them read.
        timeout_s: how long one side waits for the other.
        bucket_bytes: of each of the two; a larger tensor makes its bucket as large as it is.
        directory: where the buckets are; made by `open_transport`.
    """

    dtype: str
    float32_names: frozenset[str]
    num_workers: tuple[int, ...]
    timeout_s: float
    bucket_bytes: int
    directory: Path

    @property
    def sources(self) -> tuple[SharedMemorySource, ...]:
        """See `Transport`."""
        return tuple(
            SharedMemorySource(self.directory, first, self.timeout_s)
            for first in first_of_each(self.num_workers)
        )

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> Receipt:
        """See `Transport`. Every rank counts what it holds, rank 0 passes it on."""
        stream = OutgoingStream(tensors, getattr(torch, self.dtype), frozenset(self.float32_names))
        if rank() != 0:
            for _ in stream:
                pass
            return stream.sent
        with in_step(tensors):
            self._pass_on(stream)
        return stream.sent

    def _pass_on(self, stream: OutgoingStream) -> None:
        try:
            self._await_files([f"reader-{n}" for n in range(sum(self.num_workers))], "come")
            writer = _Writer(self)
            packer = Packer(self.bucket_bytes, writer.open_bucket, writer.publish)
            for name, tensor in stream:
                packer.add(name, tensor)
            packer.flush()
            writer.publish([])
            writer.await_read()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """See `Transport`; the memory is given back."""
        _mark_failed(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def await_read(self, bucket: int) -> None:
        """Wait until every receiver has left a bucket."""
        self._await_files([f"{bucket}.read-{n}" for n in range(sum(self.num_workers))], "read on")

    def _await_files(self, names: Collection[str], what: str) -> None:
        end = time.monotonic() + self.timeout_s
        for number, name in enumerate(names):
            while not (self.directory / name).exists():
                if (self.directory / FAILED).exists() or not self.directory.exists():
                    raise ReceiverGoneError("a rollout engine gave up while it took weights")
                if time.monotonic() > end:
                    raise DeadlineError(f"rollout engine {number} to {what}", self.timeout_s)
                time.sleep(POLL_S)


def open_transport(
    dtype: str,
    float32_names: frozenset[str],
    timeout_s: float,
    num_workers: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
) -> SharedMemoryTransport:
    """A transport with a place of its own; what killed processes left is removed.

    Args:
        dtype: as in `SharedMemoryTransport`.
        float32_names: as in `SharedMemoryTransport`.
        timeout_s: as in `SharedMemoryTransport`.
        num_workers: as in `SharedMemoryTransport`.
        bucket_bytes: as in `SharedMemoryTransport`.

    Returns:
        The transport; `stop` removes its place.
    """
    for left in SHARED_MEMORY.glob(f"{PREFIX}*"):
        namespace, process, _ = left.name.removeprefix(PREFIX).split("-")
        if namespace == _process_namespace() and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)
    owner = f"{_process_namespace()}-{os.getpid()}"
    directory = SHARED_MEMORY / f"{PREFIX}{owner}-{secrets.token_hex(8)}"
    directory.mkdir(mode=0o700)
    return SharedMemoryTransport(
        dtype, float32_names, tuple(num_workers), timeout_s, bucket_bytes, directory
    )


class _Buckets:
    """The two files, mapped once for as long as they keep their size."""

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / "bucket-0", directory / "bucket-1")
        self._mapped: dict[int, Tensor] = {}

    def memory(self, number: int, num_bytes: int = 0) -> Tensor:
        """All bytes of a bucket, (N,) uint8; the file is made, and as large as `num_bytes`."""
        place = number % 2
        with self._paths[place].open("a+b" if num_bytes else "r+b") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes < num_bytes:
                # Taken now, so that full memory is an error here, not a signal at the first write.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                size_bytes = num_bytes
            held = self._mapped.get(place)
            if held is None or held.numel() != size_bytes:
                held = torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=torch.uint8)
                self._mapped[place] = held
        return held


class _Writer:
    """Publishes one bucket after the other."""

    def __init__(self, to: SharedMemoryTransport) -> None:
        self._to = to
        self._buckets = _Buckets(to.directory)
        self._number = 0

    def open_bucket(self, num_bytes: int) -> Tensor:
        """Memory of the bucket before the last one, once it is free again."""
        self.await_read()
        return self._buckets.memory(self._number, num_bytes)

    def await_read(self) -> None:
        """Wait until the bucket before the last one was read."""
        if self._number > 1:
            self._to.await_read(self._number - 2)

    def publish(self, entries: Sequence[Entry]) -> None:
        """Say what lies in the next bucket; nothing in the last one."""
        message = self._to.directory / f"{self._number}.json"
        draft = message.with_suffix(".draft")
        draft.write_text(entries_to_json(entries), "utf-8")
        draft.rename(message)
        self._number += 1


def _mark_failed(directory: Path) -> None:
    with suppress(FileNotFoundError):  # removed meanwhile, which says the same
        (directory / FAILED).touch()


def _process_namespace() -> str:
    """Names what process ids are unique in: containers may share memory and not those."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)
