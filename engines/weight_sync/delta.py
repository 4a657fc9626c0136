"""Sends a bucket as its difference from the bytes that both ends kept of the last transfer.

Both are XORed as 16-bit words. The words that are not zero follow each other; a bitmap marks their
places, and a second one the bytes of the first that are not zero.
Promises: any bytes are rebuilt exactly. N bytes become N * (1 / 128 + s + min(s / 2, 1 / 16)) at
most for a share s of changed words, and never more than N. All is sent whole if an end does not
hold the confirmed digest. Each end keeps its buckets in host memory, pinned for a device: a reader
all weights, a sender its part. Torch rounds pinned blocks up to a power of two. On the device a
sender needs its bucket once more, a reader twice.
"""

import logging
from collections import defaultdict, deque
from functools import partial

import torch
from torch import Tensor

from engines.checksum import ChecksumMethod, TensorChecksums
from engines.errors import WeightSyncError

logger = logging.getLogger(__name__)
SLICE_BYTES = 1 << 24
"""Part of a bucket that is worked on at a time, which takes up to ten times its bytes."""
BLOCK_BYTES = 128
"""What one byte of the second bitmap stands for: 8 bytes of the first, 64 words."""
_GATHER = 0x0102040810204080
"""Multiplied by an int64 of 8 bytes 0 or 1, has these as the bits of its highest byte."""

Sizes = tuple[int, int]  # of words, and of bytes of the first bitmap, that are not zero


def encode(bucket: Tensor, base: Tensor) -> tuple[Tensor, Sizes] | None:
    """Return the difference of a bucket, (N,) uint8, from its base, as (M,) uint8; None if M >= N.

    `base` has the bytes of another bucket, and zeros up to a multiple of `BLOCK_BYTES`.
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    left_bytes = bucket.numel()
    for own, of_base in zip(bucket.split(SLICE_BYTES), base.split(SLICE_BYTES), strict=True):
        difference = of_base.to(bucket.device, copy=True)
        difference[: own.numel()] ^= own
        words = difference.view(torch.int16)
        marks = _marks(words)
        touched = words.view(-1, 8)[marks != 0].view(-1)
        parts = touched[touched != 0].view(torch.uint8), marks[marks != 0], _marks(marks)
        found.append(parts)
        left_bytes -= sum(part.numel() for part in parts)
        if left_bytes <= 0:
            return None
    changed, marked, outline = map(torch.cat, zip(*found, strict=True))
    return torch.cat([changed, marked, outline]), (changed.numel() // 2, marked.numel())


def num_bytes_sent(num_bytes: int, sizes: Sizes) -> int:
    """Return M of `encode` for a bucket of `num_bytes`."""
    num_words, num_marked = sizes
    return 2 * num_words + num_marked + _padded(num_bytes) // BLOCK_BYTES


def apply(parts: Tensor, sizes: Sizes, base: Tensor) -> None:
    """Turn a base into the bucket whose difference is `parts`, in place; see `encode`."""
    num_words, num_marked = sizes
    changed, marked, outline = parts.tensor_split([2 * num_words, 2 * num_words + num_marked])
    words = changed.view(torch.int16)
    slices = zip(
        base.view(torch.int16).split(SLICE_BYTES // 2),
        outline.split(SLICE_BYTES // BLOCK_BYTES),
        strict=True,
    )
    for own, of_outline in slices:
        is_marked = _places(of_outline)
        marks, marked = marked.tensor_split([int(is_marked.sum())])
        is_changed = _places(marks)
        values, words = words.tensor_split([int(is_changed.sum())])
        difference = torch.zeros(8 * marks.numel(), dtype=torch.int16, device=parts.device)
        difference.masked_scatter_(is_changed, values)
        own.view(-1, 8)[is_marked] ^= difference.view(-1, 8)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _marks(values: Tensor) -> Tensor:
    """Return one bit per value, set unless it is zero, as (N / 8,) uint8."""
    marks = (values != 0).view(torch.int64)
    return marks.mul_(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def _places(marks: Tensor) -> Tensor:
    """Return the bits of `_marks`, (N,) bool."""
    bits = torch.arange(8, dtype=torch.uint8, device=marks.device)
    return (marks[:, None] >> bits & 1).bool().view(-1)


class DeltaBases:
    """The buckets of the last transfer in one process, which those of this transfer replace.

    `confirmed` has the digests that all ends confirmed, or is empty.
    """

    def __init__(self, method: ChecksumMethod) -> None:
        self.confirmed = ""
        self._held = ""
        self._num_sent_bytes = 0
        self._bases = defaultdict[int, deque[Tensor]](deque)
        self._renewed = defaultdict[int, deque[Tensor]](deque)
        self._checksums = defaultdict[int, TensorChecksums](partial(TensorChecksums, method))

    def encode(self, sender: int, bucket: Tensor) -> tuple[Tensor, Sizes | None]:
        """Return the bytes to send for a bucket, and None if they are the bucket's own."""
        base, encoded = self._next_base(sender), None
        if base.numel() == _padded(bucket.numel()):
            encoded = encode(bucket, base)
        del base
        self._keep(sender, bucket)
        encoded = encoded or (bucket, None)
        self._num_sent_bytes += encoded[0].numel()
        return encoded

    def rebuild(self, sender: int, parts: Tensor, sizes: Sizes | None, bucket: Tensor) -> None:
        """Fill a bucket from the bytes that were sent for it, unless they are its own."""
        base = self._next_base(sender)
        if sizes is not None:
            base = base.to(bucket.device)
            apply(parts, sizes, base)
            bucket.copy_(base[: bucket.numel()])
        del base  # freed first
        self._keep(sender, bucket)

    def finish(self) -> str:
        """Make this transfer's buckets the bases, log sent bytes; return each sender's digest."""
        if self._num_sent_bytes:
            num_bytes = sum(found.num_bytes for found in self._checksums.values())
            logger.info("delta sync sent %d of %d bytes", self._num_sent_bytes, num_bytes)
        self._num_sent_bytes, self.confirmed = 0, ""
        self._held = " ".join(found.digest() for _, found in sorted(self._checksums.items()))
        self._checksums.clear()
        self._bases, self._renewed = self._renewed, defaultdict(deque)
        return self._held

    def confirm(self, rebuilt: str) -> None:
        """Compare with a reader's digests, of all senders; WeightSyncError if they differ."""
        if not set(self._held.split()) <= set(rebuilt.split()):
            raise WeightSyncError(
                f"this process holds buckets {self._held}, a rollout engine rebuilt {rebuilt}"
            )
        self.confirmed = rebuilt

    def _next_base(self, sender: int) -> Tensor:
        left = self._bases[sender]
        return left.popleft() if left else torch.empty(0, dtype=torch.uint8)

    def _keep(self, sender: int, bucket: Tensor) -> None:
        size, pinned = _padded(bucket.numel()), bucket.device.type != "cpu"
        copy = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        copy[: bucket.numel()].copy_(bucket)
        self._checksums[sender].add(f"bucket {sender} {len(self._renewed[sender])}", bucket)
        self._renewed[sender].append(copy)
