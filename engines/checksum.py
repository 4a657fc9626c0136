"""Checksums of tensors and of whole sets of weights, for transfers inside a job.

Promises: equal dtype, shape and bytes give an equal checksum on every machine and device; a
changed bit, two swapped elements or a permuted row give a different one; the digest of a set does
not depend on the order of its tensors. A tensor that is on a device or not contiguous needs at most
2 x `CHUNK_BYTES` of additional memory.
Does not promise security: chosen bytes can collide, see `infra.identity` for stored data.

A tensor is hashed with 128-bit XXH3, which is faster than a memory copy; a set with BLAKE2b
(RFC 7693). Device tensors are copied to the host in pieces: `torch.hash_tensor` works on the device
but is the XOR of all elements, which misses swaps and permutations.
"""

import hashlib
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

DIGEST_SIZE_BYTES = 16
CHUNK_BYTES = 1 << 25


def tensor_checksum(tensor: Tensor) -> str:
    """Return the 128-bit checksum of dtype, shape and row-major bytes as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for piece in _host_pieces(tensor.detach()):
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _host_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in row-major order as flat host tensors; each is valid until the next."""
    if tensor.is_contiguous():
        # `view(-1)` would keep the stride of a single element.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        yield from [flat] if tensor.device.type == "cpu" else _copied_to_host(flat)
    elif tensor.nbytes <= CHUNK_BYTES:
        yield from _host_pieces(tensor.contiguous())
    else:
        rows = max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)
        for part in tensor.split(rows) if rows > 1 else tensor:
            yield from _host_pieces(part)


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
    return digest.hexdigest()
