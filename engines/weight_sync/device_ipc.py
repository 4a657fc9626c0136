"""Passes weights from a trainer to rollout engines on devices of its node, device to device.

The protocol is that of `shared_memory`; a file holds the handle of a bucket on the sender's device,
and each reader opens it on its own. Sender and readers may have different versions of torch. A
tensor larger than a bucket gets memory of its own, which is freed once it was read.
Promises: checksums are computed on the devices. If a device refuses, as one without peer access,
the buckets are in the host's shared memory, and the sender logs the reason. The sender frees memory
after all readers closed it; after a failed transfer it cannot know that, and does so when it sends
again.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from engines.checksum import ChecksumMethod
from engines.errors import WeightSyncError
from engines.weight_sync import shared_memory
from engines.weight_sync.shared_memory import (
    Buckets,
    HostBuckets,
    SharedMemorySource,
    SharedMemoryTransport,
    TransferFiles,
)
from hardware.detection import planned
from hardware.ipc_memory import IpcMemory
from infra.errors import DeadlineError

BUCKET_BYTES = 256 * 2**20
ON_HOST = "on-host"
_log = logging.getLogger(__name__)
_left: list[tuple[IpcMemory, Tensor]] = []
"""Memory of failed transfers of this process."""


def open_transport(
    platform: str,
    dtype: str,
    float32_names: frozenset[str],
    timeout_s: float,
    host: str,
    num_workers: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
    senders: Sequence[int] = (),
) -> "DeviceIpcTransport":
    """Return a transport between devices of a platform; see `shared_memory.open_transport`."""
    on_host = shared_memory.open_transport(
        dtype, float32_names, timeout_s, host, num_workers, bucket_bytes, senders
    )
    return DeviceIpcTransport(**vars(on_host), platform=platform)


@dataclass(frozen=True)
class DeviceIpcTransport(SharedMemoryTransport):
    """Transport through memory of the sender's device; `platform` is the name of a platform."""

    platform: str

    def source(self, reader: int, sender: int) -> "DeviceIpcSource":
        """See the base class."""
        return DeviceIpcSource(**vars(super().source(reader, sender)), platform=self.platform)

    def buckets(self, directory: Path) -> Buckets:
        """See the base class."""
        return _SenderBuckets(directory, self.platform, self.bucket_bytes)


@dataclass(frozen=True)
class DeviceIpcSource(SharedMemorySource):
    """Source that reads memory of the sender's device, on the current device of its process."""

    platform: str

    @property
    def checksum_method(self) -> ChecksumMethod:
        """See `WeightSource`."""
        return "matmul"

    def buckets(self, files: TransferFiles, late: DeadlineError) -> Buckets:
        """See the base class."""
        files.wait(_name(0), time.monotonic() + self.timeout_s, late)
        return _ReaderBuckets(files.directory, self.platform, self.reader)


def _name(number: int, *, once: bool = False) -> str:
    """Return the name of the file with the handle of bucket `number`, or of its own memory."""
    return f"once-{number}" if once else f"device-{number % 2}"


class _SenderBuckets(Buckets):
    def __init__(self, directory: Path, platform: str, bucket_bytes: int) -> None:
        self._directory, self._bucket_bytes = directory, bucket_bytes
        self._host: HostBuckets | None = None
        self._held: dict[str, Tensor] = {}
        while _left:
            ipc, memory = _left.pop()
            ipc.free(memory)
        try:
            self._platform = planned(platform)
            self._ipc = self._platform.ipc_memory()
            self._make(_name(0), bucket_bytes)
        except RuntimeError as error:
            self._stay_on_host(str(error))
            (directory / _name(0)).touch()

    def memory(self, number: int, num_bytes: int = 0) -> Tensor:
        """See `Buckets`."""
        if number == 0 and (refused := sorted(self._directory.glob("refused-*"))):
            self._stay_on_host(refused[0].read_text(encoding="utf-8"))
        if self._host is not None:
            return self._host.memory(number, num_bytes)
        if (read := self._held.pop(_name(number - 2, once=True), None)) is not None:
            self._ipc.free(read)
        name = _name(number, once=num_bytes > self._bucket_bytes)
        if name not in self._held:
            try:
                self._make(name, num_bytes)
            except RuntimeError as error:
                raise WeightSyncError(
                    f"the trainer's device has no memory for weights on their way: {error}; choose "
                    "rollout.transport: shared_memory"
                ) from error
        return self._held[name]

    def end(self) -> None:
        """See `Buckets`."""
        while self._held:
            self._ipc.free(self._held.popitem()[1])

    def close(self) -> None:
        """See `Buckets`."""
        while self._held:
            _left.append((self._ipc, self._held.popitem()[1]))

    def _make(self, name: str, num_bytes: int) -> None:
        try:
            memory = self._ipc.allocate(num_bytes)
        except RuntimeError:
            self._platform.empty_cache()  # which torch has cached since the last update
            memory = self._ipc.allocate(num_bytes)
        self._held[name] = memory
        text = json.dumps([self._ipc.handle(memory).hex(), num_bytes])
        draft = self._directory / "draft"
        draft.write_text(text, "utf-8")
        draft.rename(self._directory / name)

    def _stay_on_host(self, reason: str) -> None:
        self._host = HostBuckets(self._directory)
        (self._directory / ON_HOST).touch()
        _warn(reason)


class _ReaderBuckets(Buckets):
    def __init__(self, directory: Path, platform: str, reader: int) -> None:
        self._directory, self._host = directory, HostBuckets(directory)
        self._held: dict[str, Tensor] = {}
        if (directory / ON_HOST).exists():
            return
        try:
            self._ipc = planned(platform).ipc_memory()
            self._opened(_name(0))
        except RuntimeError as error:
            (directory / f"refused-{reader}").write_text(str(error), "utf-8")

    def memory(self, number: int, num_bytes: int = 0) -> Tensor:
        """See `Buckets`."""
        if (self._directory / ON_HOST).exists():
            return self._host.memory(number)
        own = _name(number, once=True)
        try:
            return self._opened(own if (self._directory / own).exists() else _name(number))
        except RuntimeError as error:
            raise WeightSyncError(f"weights on the trainer's device: {error}") from error

    def release(self, number: int) -> None:
        """See `Buckets`."""
        if (memory := self._held.pop(_name(number, once=True), None)) is not None:
            self._ipc.close(memory)

    def end(self) -> None:
        """See `Buckets`."""
        while self._held:
            self._ipc.close(self._held.popitem()[1])

    def _opened(self, name: str) -> Tensor:
        if name not in self._held:
            handle, num_bytes = json.loads((self._directory / name).read_text(encoding="utf-8"))
            self._held[name] = self._ipc.open(bytes.fromhex(handle), num_bytes)
        return self._held[name]


@cache
def _warn(reason: str) -> None:
    _log.warning("weights travel through the host's memory, since a device refuses: %s", reason)
