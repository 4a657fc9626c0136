"""Checksums of tensors and of whole sets of weights, for transfers inside a job.

Promises: equal dtype, shape and bytes give an equal checksum, on every machine and device; a
changed bit, two swapped elements or a permuted row give another one; a set's digest does not
depend on the order of arrival. Beside a tensor that lies on a device, or not row by row, at most
twice `CHUNK_BYTES` are held.
Does not promise anything against intent: whoever chooses bytes can make two tensors collide. What
is stored and trusted later needs a cryptographic hash (`infra.identity`), which costs ten times
as much and more than the copy it guards.

A tensor is hashed by XXH3 with 128 bits, faster than memory is copied; a set by BLAKE2b (RFC
7693) over a line per tensor, which costs nothing. Elsewhere than on the host the bytes are
brought to it in pieces: `torch.hash_tensor`, which would stay on the device, is the XOR of all
elements, so it sees neither a swap nor a permutation nor the same error twice.
"""

import hashlib
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

DIGEST_SIZE_BYTES = 16
CHUNK_BYTES = 1 << 25


def tensor_checksum(tensor: Tensor) -> str:
    """128-bit checksum of a tensor's dtype, shape and raw bytes, as 32 hexadecimal digits.

    The bytes are those of the row-major contiguous form, so strides do not matter.
    """
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for piece in _host_pieces(tensor.detach()):
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _host_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The elements row by row, as flat tensors on the host; each is valid until the next."""
    if tensor.is_contiguous():
        # Not `view(-1)`: that keeps the stride of a single element.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        yield from [flat] if tensor.device.type == "cpu" else _brought_to_host(flat)
    elif tensor.nbytes <= CHUNK_BYTES:
        yield from _host_pieces(tensor.contiguous())
    else:
        rows = max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)
        for part in tensor.split(rows) if rows > 1 else tensor:
            yield from _host_pieces(part)


def _brought_to_host(flat: Tensor) -> Iterator[Tensor]:
    """Pieces of a flat tensor of a device, through one page-locked buffer."""
    size = max(1, CHUNK_BYTES // flat.element_size())
    # Copies to ordinary memory go through a small buffer of the driver, several times slower.
    buffer = torch.empty(min(size, flat.numel()), dtype=flat.dtype, pin_memory=True)
    for piece in flat.split(size):
        yield buffer[: piece.numel()].copy_(piece)


def combine(pairs: Iterable[tuple[str, str]]) -> str:
    """Digest of a set of weights, independent of the order of its parts.

    Args:
        pairs: (name, checksum) of every tensor.

    Returns:
        32 hexadecimal digits.

    Raises:
        ValueError: a name occurs twice.
    """
    checksums: dict[str, str] = {}
    for name, checksum in pairs:
        if name in checksums:
            raise ValueError(f"tensor {name} occurs twice")
        checksums[name] = checksum
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE_BYTES)
    for name in sorted(checksums):
        digest.update(f"{name}\0{checksums[name]}\n".encode())
    return digest.hexdigest()
