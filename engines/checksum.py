"""Checksums of tensors and of whole sets of weights, for transfers inside a job.

Promises: equal dtype, shape and bytes give an equal checksum on every machine and device; a
changed bit, two swapped elements or a permuted row give a different one; the digest of a set does
not depend on the order of its tensors. A tensor that is on a device or not contiguous needs at most
2 x `CHUNK_BYTES` of additional memory.
Does not promise security: chosen bytes can collide, see `infra.identity` for stored data.

Two methods. `xxh3` is 128-bit XXH3, which on a host is faster than a memory copy; device tensors
are copied to the host for it. `matmul` (`engines.matmul_checksum`) is computed on the tensor's own
device, and is equal on a host, where it takes twice as long. A transfer has one method, which its
source names; digests of different methods are never equal. A set's digest is BLAKE2b (RFC 7693).
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
import xxhash
from torch import Tensor

from engines.matmul_checksum import finish, row_hashes

ChecksumMethod = Literal["xxh3", "matmul"]
DIGEST_SIZE_BYTES = 16
CHUNK_BYTES = 1 << 25
MATMUL = "matmul:"
"""Prefix of checksums and digests of this method; those of `xxh3` have none."""


def method_on(device_name: str) -> ChecksumMethod:
    """Return the fastest method where both ends hold tensors on a torch device type."""
    return "xxh3" if device_name == "cpu" else "matmul"


def tensor_checksum(tensor: Tensor, method: ChecksumMethod = "xxh3") -> str:
    """Return the 128-bit checksum of dtype, shape and row-major bytes in hexadecimal digits."""
    checksums = TensorChecksums(method)
    checksums.add("", tensor)
    return checksums.by_name()[""]


class TensorChecksums:
    """Checksums of named tensors, each read when it is added; devices are not waited for then."""

    def __init__(self, method: ChecksumMethod) -> None:
        self._method: ChecksumMethod = method
        self._finished: dict[str, str] = {}
        self._begun: dict[str, tuple[bytes, Tensor]] = {}
        self._device: torch.device | None = None
        self._held_bytes = 0
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._finished or name in self._begun

    def add(self, name: str, tensor: Tensor) -> None:
        """Read a tensor, which later work may overwrite; ValueError if the name occurs twice."""
        if name in self:
            raise ValueError(f"tensor {name} occurs twice")
        tensor = tensor.detach()
        head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        self.num_bytes += tensor.nbytes
        if self._method == "xxh3":
            digest = xxhash.xxh3_128(head)
            for piece in _host_pieces(tensor):
                digest.update(piece.view(torch.uint8).numpy().data)
            self._finished[name] = digest.hexdigest()
            return
        hashes = row_hashes(_flat_pieces(tensor), tensor.nbytes, tensor.device, CHUNK_BYTES)
        if self._held_bytes > CHUNK_BYTES or tensor.device != self._device:
            self._finish()
        self._begun[name], self._device = (head, hashes), tensor.device
        self._held_bytes += hashes.nbytes

    def by_name(self) -> dict[str, str]:
        """Return the checksum of every tensor by name; waits for devices."""
        self._finish()
        return self._finished

    def digest(self) -> str:
        """Return the digest of the set; see `combine`."""
        return combine(self.by_name().items())

    def _finish(self) -> None:
        if not self._begun:
            return
        roots = finish([hashes for _, hashes in self._begun.values()])
        for (name, (head, _)), root in zip(self._begun.items(), roots, strict=True):
            digest = hashlib.blake2b(head + root, digest_size=DIGEST_SIZE_BYTES)
            self._finished[name] = MATMUL + digest.hexdigest()
        self._begun.clear()
        self._held_bytes = 0


def _flat_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in row-major order as flat tensors; each is valid until the next."""
    if tensor.is_contiguous():
        # `view(-1)` would keep the stride of a single element.
        yield tensor.as_strided((tensor.numel(),), (1,))
    elif tensor.nbytes <= CHUNK_BYTES:
        yield from _flat_pieces(tensor.contiguous())
    else:
        rows = max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)
        for part in tensor.split(rows) if rows > 1 else tensor:
            yield from _flat_pieces(part)


def _host_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in row-major order as flat host tensors; each is valid until the next."""
    for flat in _flat_pieces(tensor):
        yield from [flat] if flat.device.type == "cpu" else _copied_to_host(flat)


def _copied_to_host(flat: Tensor) -> Iterator[Tensor]:
    """Yield pieces of a flat device tensor through one pinned buffer."""
    size = max(1, CHUNK_BYTES // flat.element_size())
    # Copies to pageable memory go through a small buffer of the driver, several times slower.
    buffer = torch.empty(min(size, flat.numel()), dtype=flat.dtype, pin_memory=True)
    for piece in flat.split(size):
        yield buffer[: piece.numel()].copy_(piece)


def combine(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the order-independent digest of (name, checksum) pairs; ValueError for equal names."""
    checksums: dict[str, str] = {}
    for name, checksum in pairs:
        if name in checksums:
            raise ValueError(f"tensor {name} occurs twice")
        checksums[name] = checksum
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE_BYTES)
    for name in sorted(checksums):
        digest.update(f"{name}\0{checksums[name]}\n".encode())
    is_matmul = any(checksum.startswith(MATMUL) for checksum in checksums.values())
    return f"{MATMUL if is_matmul else ''}{digest.hexdigest()}"
