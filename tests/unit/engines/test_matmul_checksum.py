"""The checksum that devices compute, against its definition in float64 from numpy bytes."""

import hashlib
import random

import numpy as np
import pytest
import torch

from engines import checksum, matmul_checksum
from engines.checksum import TensorChecksums, combine, tensor_checksum

NUM_DRAWN = 10_000
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8,
    torch.bool, torch.float8_e4m3fn, torch.uint8,
]  # fmt: skip
KEYS = [
    np.frombuffer(hashlib.shake_256(f"matmul checksum {n}".encode()).digest(65536), "i1")
    .reshape(16, 4096).T.astype("f8")
    for n in range(5)
]  # fmt: skip
BATCH = 500


def expected(tensor: torch.Tensor) -> str:
    """Products of at most 4096 x 2^14 are exact in float64, in any order."""
    stored = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() or bytes(1)
    for keys in KEYS:
        padded = stored + bytes(-len(stored) % 4096)
        rows = np.frombuffer(padded, "i1").reshape(-1, 4096).astype("f8")
        stored = (rows @ keys).astype("<i4").tobytes()
    assert len(stored) == 64
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return "matmul:" + hashlib.blake2b(head + stored, digest_size=16).hexdigest()


def found(tensors: list[torch.Tensor]) -> list[str]:
    checksums = TensorChecksums("matmul")
    for number, tensor in enumerate(tensors):
        checksums.add(str(number), tensor)
    return list(checksums.by_name().values())


def drawn(draw: random.Random, memory: torch.Tensor) -> torch.Tensor:
    """Of any dtype, shape, alignment and stride; one in some hundred has more than 64 rows."""
    dtype = draw.choice(DTYPES)
    shape = [draw.choice((0, 1, 2, 3, 5, 8, 17)) for _ in range(draw.randrange(4))]
    if draw.random() < 0.003:
        shape = [draw.randrange(300, 800), 513]
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=int))
    start = draw.randrange(1000) * 8
    stored = memory[start : start + num_bytes]
    stored = stored % 2 if dtype is torch.bool else stored
    tensor = stored.view(dtype).view(shape)
    return tensor.transpose(0, -1) if shape and draw.random() < 0.3 else tensor


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    return torch.randint(0, 256, (1 << 23,), generator=torch.Generator().manual_seed(1)).byte()


def test_the_definition_over_drawn_tensors(memory):
    draw = random.Random(5)
    for _ in range(NUM_DRAWN // BATCH):
        tensors = [drawn(draw, memory) for _ in range(BATCH)]
        assert found(tensors) == [expected(tensor) for tensor in tensors]


def flip(draw: random.Random, values: torch.Tensor) -> None:
    values.view(torch.uint8)[draw.randrange(values.nbytes)] ^= 1 << draw.randrange(8)


def swap(draw: random.Random, values: torch.Tensor) -> None:
    one, other = draw.sample(range(len(values)), 2)
    values[[one, other]] = values[[other, one]]


def permute_rows(draw: random.Random, values: torch.Tensor) -> None:
    rows = values.view(-1, 8)
    order = list(range(len(rows)))
    while order == sorted(order):
        draw.shuffle(order)
    rows[:] = rows[order]


def negate_two(draw: random.Random, values: torch.Tensor) -> None:
    """Two sign bits, which a sum of words times odd keys modulo 2^64 may lose."""
    values[draw.sample(range(len(values)), 2)] *= -1


def shift(draw: random.Random, values: torch.Tensor) -> None:
    values[:] = values.roll(draw.randrange(1, len(values)))


@pytest.mark.parametrize(
    ("edit", "num"),
    [(flip, 10_000), (swap, 10_000), (permute_rows, 10_000), (negate_two, 2000), (shift, 2000)],
)
def test_every_edit_is_found(edit, num):
    draw, generator = random.Random(7), torch.Generator().manual_seed(2)
    for _ in range(num // BATCH):
        values = torch.randn(8 * draw.randrange(2, 300), generator=generator)
        edited = values.repeat(BATCH, 1)
        for row in edited:
            edit(draw, row)
        assert (edited != values).any(1).all()
        assert tensor_checksum(values, "matmul") not in found(list(edited))


def test_edits_across_levels_are_found():
    """Of 70 rows two are swapped, in one group of 64 and in two."""
    rows = torch.randn(70, 1024, generator=torch.Generator().manual_seed(3))
    first, far = rows.clone(), rows.clone()
    first[[0, 1]], far[[0, 69]] = rows[[1, 0]], rows[[69, 0]]
    assert len(set(found([rows, first, far, rows[:69], rows.flatten()]))) == 5


def test_zeros_of_every_length_dtype_and_shape_differ():
    zeros = [torch.zeros(size) for size in (0, 1, 2, 1024, 1025, 66_000)]
    zeros += [torch.zeros(1, 2), torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32)]
    assert len(set(found(zeros))) == len(zeros)


@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 14, 1 << 25])
@pytest.mark.parametrize("view", [
    lambda t: t, lambda t: t.permute(2, 0, 1), lambda t: t[:, 1:30], lambda t: t[..., ::2],
    lambda t: t.flatten()[3:], lambda t: t[:1].expand(3, 40, 50),
])  # fmt: skip
def test_the_size_of_pieces_and_strides_do_not_matter(monkeypatch, view, chunk_bytes):
    monkeypatch.setattr(checksum, "CHUNK_BYTES", chunk_bytes)
    tensor = view(torch.arange(6000.0).reshape(3, 40, 50))
    assert tensor_checksum(tensor, "matmul") == expected(tensor)


def test_the_float_product_is_the_integer_product(monkeypatch):
    """Devices without a right integer product use it; here extremes and drawn bytes."""
    extremes = torch.tensor([-128, 127], dtype=torch.int8).repeat_interleave(2 * 4096)
    tensors = [extremes, torch.randn(5000, generator=torch.Generator().manual_seed(4))]
    whole = [expected(tensor) for tensor in tensors]
    for is_exact in (False, True):
        monkeypatch.setattr(matmul_checksum, "_is_exact", lambda _, is_exact=is_exact: is_exact)
        assert found(tensors) == whole


@pytest.mark.parametrize("fault", ["saturates", "is absent"])
def test_a_wrong_integer_product_is_not_used(monkeypatch, fault):
    def product(rows, keys):
        if fault == "is absent":
            raise NotImplementedError
        return (rows.int() @ keys.int()).clamp(-(1 << 25), 1 << 25)

    monkeypatch.setattr(torch, "_int_mm", product)
    matmul_checksum._is_exact.cache_clear()
    tensor = torch.full((8192,), 127, dtype=torch.int8)
    assert tensor_checksum(tensor, "matmul") == expected(tensor)
    assert not matmul_checksum._is_exact(torch.device("cpu"))
    matmul_checksum._is_exact.cache_clear()


def test_a_digest_names_its_method():
    tensor = torch.ones(3)
    pairs = [("a", tensor_checksum(tensor, "matmul"))]
    assert combine(pairs).startswith("matmul:")
    assert ":" not in combine([("a", tensor_checksum(tensor))])


def test_a_set_is_the_same_in_parts(monkeypatch):
    """The pending hashes are finished whenever they are large, or the device changes."""
    tensors = [torch.full((size,), 1.0) for size in (5000, 3, 70_000, 0)]
    whole = found(tensors)
    monkeypatch.setattr(checksum, "CHUNK_BYTES", 1)
    assert found(tensors) == whole == [expected(tensor) for tensor in tensors]
    checksums = TensorChecksums("matmul")
    checksums.add("a", tensors[0])
    with pytest.raises(ValueError, match="a occurs twice"):
        checksums.add("a", tensors[0])
