"""A checksum of bytes that every device computes as products of small integer matrices.

The bytes are rows of `ROW_BYTES` signed 8-bit integers, the last row filled with zeros. A row's
hash is its product with a matrix of `NUM_LANES` columns of fixed random 8-bit integers: 16 sums in
32 bits, which cannot overflow. The hashes of 64 rows are the bytes of one row of the next level; at
level `DEPTH` one hash is left. The caller adds dtype and shape, so the zeros are unambiguous.

Promises: all sums are exact. A device's integer product is used only if it is right for extreme and
drawn numbers; else the product is in float32, in parts whose sums stay under 2^24, which is exact
in any order and with TF32 too. A tensor is read once, and later levels run for many together.
Bound: for drawn keys two different rows agree in one lane with probability at most 1/256, since a
difference d != 0 fixes the key k of k * d = c; in all lanes at most 2^-128, over all levels at most
`DEPTH` times that. This is multilinear hashing over the integers (Carter and Wegman 1979; Lemire
and Kaser 2014, arXiv:1202.4961). The keys are fixed, so the bound is for errors, not for attacks.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

ROW_BYTES = 4096
NUM_LANES = 16
HASH_BYTES = NUM_LANES * 4
FAN_IN = ROW_BYTES // HASH_BYTES
DEPTH = 5
"""Levels; the last one's row stands for up to 64 GiB."""
_MIN_ROWS = 32
_EXACT_COLUMNS = 1024
"""Terms of 2^14 whose sum is an exact float32."""
_FLOAT_ROWS = 2048


def row_hashes(
    pieces: Iterable[Tensor], num_bytes: int, device: torch.device, chunk_bytes: int
) -> Tensor:
    """Return the (R, 16) int32 hashes of the rows of one tensor, R >= 1.

    `pieces` are flat, contiguous and together `num_bytes`; each is valid until the next. Extra
    memory is `chunk_bytes` if there are several.
    """
    blocks = _row_blocks(pieces, num_bytes, device, chunk_bytes)
    return torch.cat([_product(rows, 0) for rows in blocks])


def finish(hashes: Sequence[Tensor]) -> list[bytes]:
    """Return each tensor's 64-byte root from its `row_hashes`; ValueError beyond 64 GiB."""
    flat = torch.cat(list(hashes))
    counts = np.array([len(each) for each in hashes])
    for level in range(1, DEPTH):
        num_rows = -(-counts // FAN_IN)
        shifts = FAN_IN * (num_rows.cumsum() - num_rows) - (counts.cumsum() - counts)
        places = torch.from_numpy(np.arange(len(flat)) + shifts.repeat(counts))
        padded = flat.new_zeros(int(num_rows.sum()) * FAN_IN, NUM_LANES)
        padded[places.to(flat.device)] = flat
        flat = _product(padded.view(-1).view(torch.int8).view(-1, ROW_BYTES), level)
        counts = num_rows
    if len(flat) != len(hashes):
        raise ValueError("a tensor is larger than 64 GiB, the limit of its checksum")
    return [root.tobytes() for root in flat.cpu().numpy()]


def _row_blocks(
    pieces: Iterable[Tensor], num_bytes: int, device: torch.device, chunk_bytes: int
) -> Iterator[Tensor]:
    """Yield (R, ROW_BYTES) int8 blocks of rows; each is valid until the next."""
    left_bytes, filled = num_bytes, 0
    staged = torch.empty(0, dtype=torch.int8, device=device)
    for piece in pieces:
        left = piece.view(torch.int8)
        # Integer products need aligned memory.
        if not filled and left.data_ptr() % 16 == 0 and len(left) >= ROW_BYTES:
            end = len(left) // ROW_BYTES * ROW_BYTES
            yield left[:end].view(-1, ROW_BYTES)
            left, left_bytes = left[end:], left_bytes - end
        while len(left):
            if not filled and len(staged) < min(left_bytes, chunk_bytes):
                num_rows = -(-min(left_bytes, chunk_bytes) // ROW_BYTES)
                staged = staged.new_zeros(num_rows * ROW_BYTES)
            taken = min(len(left), len(staged) - filled)
            staged[filled : filled + taken] = left[:taken]
            left, filled, left_bytes = left[taken:], filled + taken, left_bytes - taken
            if filled == len(staged):
                yield staged.view(-1, ROW_BYTES)
                filled = 0
    if filled or num_bytes == 0:
        num_rows = max(1, -(-filled // ROW_BYTES))
        staged = torch.cat([staged[:filled], staged.new_zeros(num_rows * ROW_BYTES - filled)])
        yield staged.view(-1, ROW_BYTES)


def _product(rows: Tensor, level: int) -> Tensor:
    """Return rows (R, ROW_BYTES) int8 times the keys of a level, (R, NUM_LANES) int32."""
    keys = _keys(level, rows.device)
    if not _is_exact(rows.device):
        return torch.cat([_float_product(part, keys) for part in rows.split(_FLOAT_ROWS)])
    return _integer_product(rows, keys)


def _integer_product(rows: Tensor, keys: Tensor) -> Tensor:
    num_rows = len(rows)
    # CUDA needs more than 16 rows.
    if num_rows < _MIN_ROWS and rows.device.type != "cpu":
        rows = torch.cat([rows, rows.new_zeros(_MIN_ROWS - num_rows, ROW_BYTES)])
    found = torch._int_mm(rows, keys.t())  # pyright: ignore[reportPrivateImportUsage]
    return found[:num_rows]


def _float_product(rows: Tensor, keys: Tensor) -> Tensor:
    found = torch.zeros(len(rows), NUM_LANES, dtype=torch.int32, device=rows.device)
    for part, own in zip(rows.split(_EXACT_COLUMNS, 1), keys.split(_EXACT_COLUMNS, 1), strict=True):
        found += (part.float() @ own.float().t()).int()
    return found


@cache
def _keys(level: int, device: torch.device) -> Tensor:
    """Return the keys of a level, (NUM_LANES, ROW_BYTES) int8, the same everywhere."""
    drawn = hashlib.shake_256(f"matmul checksum {level}".encode()).digest(NUM_LANES * ROW_BYTES)
    keys = torch.frombuffer(bytearray(drawn), dtype=torch.int8)
    return keys.view(NUM_LANES, ROW_BYTES).to(device)


@cache
def _is_exact(device: torch.device) -> bool:
    """Return True if the device has an integer product, and it does not saturate or round."""
    keys = _keys(0, torch.device("cpu"))
    extremes = torch.tensor([[-128], [127]], dtype=torch.int8).expand(2, ROW_BYTES)
    rows = torch.cat([extremes, keys, keys.sign() * 127])
    try:
        found = _integer_product(rows.to(device), _keys(0, device))
    except (NotImplementedError, RuntimeError):
        return False
    return torch.equal(found.cpu(), _float_product(rows, keys))
