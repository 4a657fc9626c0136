"""Checksums of tensors and of whole sets of weights.

Promises: equal dtype, shape and bytes give an equal checksum, on every machine and device; one
bit changed anywhere changes it; a set's digest does not depend on the order of arrival.
Does not promise speed: the bytes are hashed on one core, after a copy to the host where they
are elsewhere. BLAKE2b (RFC 7693) with 128 bits, because no accident and no stale buffer can
meet it, and in plain Python it is the fastest of the strong hashes where OpenSSL lacks the SHA
instructions.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

DIGEST_SIZE_BYTES = 16


def tensor_checksum(tensor: Tensor) -> str:
    """128-bit checksum of a tensor's dtype, shape and raw bytes, as 32 hexadecimal digits.

    The bytes are those of the row-major contiguous form, so strides do not matter.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE_BYTES)
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    host = tensor.detach().to("cpu").contiguous().reshape(-1)
    digest.update(host.view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
