"""Checksums tell apart everything that differs, and nothing that does not."""

import random
import struct

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import checksum as module
from engines.checksum import combine, tensor_checksum

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def test_the_definition_computed_from_numpy_bytes():
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    expected = xxhash.xxh3_128_hexdigest(b"torch.float32(2, 3)" + array.tobytes())
    assert tensor_checksum(torch.from_numpy(array)) == expected


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.bool, b"\x01\x00\x01"),
        (torch.int16, struct.pack("<3h", 1, 0, 1)),
        (torch.bfloat16, b"\x80\x3f\x00\x00\x80\x3f"),
        (torch.float8_e4m3fn, b"\x38\x00\x38"),
        (torch.float64, struct.pack("<3d", 1, 0, 1)),
    ],
    ids=str,
)
def test_the_definition_computed_from_bytes_written_by_hand(dtype, stored):
    tensor = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    expected = xxhash.xxh3_128_hexdigest(f"{dtype}(3,)".encode() + stored)
    assert tensor_checksum(tensor) == expected


@pytest.mark.parametrize("shape", ["()", "(0,)", "(2, 0, 4)"])
def test_the_definition_of_what_has_no_bytes_or_no_dimension(shape):
    size = eval(shape)
    stored = np.zeros(size, "<f4").tobytes()
    expected = xxhash.xxh3_128_hexdigest(f"torch.float32{shape}".encode() + stored)
    assert tensor_checksum(torch.zeros(size)) == expected


def pieces_of(monkeypatch, size_bytes):
    monkeypatch.setattr(module, "CHUNK_BYTES", size_bytes)


@pytest.mark.parametrize("chunk_bytes", [1, 8, 40, 100, 1 << 25])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.permute(2, 0, 1),
        lambda t: t[:, 1:3],
        lambda t: t[..., ::2],
        lambda t: t[1, :, 2],
        lambda t: t[:1].expand(3, 4, 5),
        lambda t: t.as_strided((4, 5), (5, 1), 7),
    ],
    ids=["whole", "permuted", "slice", "step", "column", "expanded", "strided"],
)
def test_the_size_of_pieces_and_strides_do_not_matter(monkeypatch, view, chunk_bytes):
    tensor = view(torch.arange(60.0).reshape(3, 4, 5))
    pieces_of(monkeypatch, chunk_bytes)
    head = f"torch.float32{tuple(tensor.shape)}".encode()
    stored = np.ascontiguousarray(tensor.numpy()).tobytes()
    assert tensor_checksum(tensor) == xxhash.xxh3_128_hexdigest(head + stored)


def test_what_is_not_row_by_row_is_copied_in_bounded_pieces(monkeypatch):
    pieces_of(monkeypatch, 64)
    sizes = [piece.nbytes for piece in module._flat_pieces(torch.zeros(6, 50, 7).transpose(0, 2))]
    assert sum(sizes) == 6 * 50 * 7 * 4
    assert max(sizes) <= 64


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 8 * 4 * 600 - 1))
def test_every_flipped_bit_is_seen(bit):
    tensor = torch.linspace(-3, 3, 600)
    edited = tensor.clone()
    edited.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert tensor_checksum(edited) != tensor_checksum(tensor)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 599), st.integers(0, 599))
def test_two_swapped_elements_are_seen(one, other):
    """The XOR or the sum of all elements does not see them."""
    tensor = torch.randn(600, generator=torch.Generator().manual_seed(0))
    edited = tensor.clone()
    edited[[one, other]] = tensor[[other, one]]
    assert (tensor_checksum(edited) == tensor_checksum(tensor)) == (one == other)


def test_permuted_rows_columns_and_an_error_made_twice_are_seen():
    tensor = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    found = {tensor_checksum(tensor), tensor_checksum(tensor.t()), tensor_checksum(tensor.flip(0)),
             tensor_checksum(tensor.flip(1)), tensor_checksum(tensor.roll(1, 0))}  # fmt: skip
    twice = tensor.clone()
    twice.view(torch.int32)[2, 1:3] ^= 1
    assert len(found | {tensor_checksum(twice)}) == 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)], ids=str)
def test_every_dtype_and_shape_has_a_checksum_of_its_own(dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())
    other_dtype = torch.int32
    assert tensor_checksum(tensor) != tensor_checksum(tensor.to(other_dtype))
    assert tensor_checksum(tensor) != tensor_checksum(tensor[None])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1999), st.sampled_from([torch.float32, torch.bfloat16]))
def test_one_ulp_in_one_element_is_seen(index, dtype):
    tensor = torch.linspace(-3, 3, 2000).to(dtype).reshape(40, 50)
    edited = tensor.clone().reshape(-1)
    edited[index] = torch.nextafter(edited[index], torch.tensor(9.0, dtype=dtype))
    assert tensor_checksum(edited.reshape(40, 50)) != tensor_checksum(tensor)


def test_signed_zeros_differ_and_strides_do_not():
    zero = torch.zeros(4)
    assert tensor_checksum(zero) != tensor_checksum(-zero)
    tensor = torch.arange(12.0).reshape(3, 4)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())
    assert tensor_checksum(tensor.t()) != tensor_checksum(tensor)
    assert tensor_checksum(tensor[:, 1:3]) == tensor_checksum(tensor[:, 1:3].clone())


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.text("0123456789abcdef", max_size=4)), st.randoms())
def test_combination_ignores_order_only(checksums: dict[str, str], draw: random.Random):
    pairs = list(checksums.items())
    shuffled = draw.sample(pairs, len(pairs))
    assert combine(pairs) == combine(iter(shuffled))
    if pairs:
        assert combine(pairs[1:]) != combine(pairs)
        (name, checksum), *rest = pairs
        assert combine([(name, checksum + "0"), *rest]) != combine(pairs)
        assert combine([(name + "\x00x", checksum), *rest]) != combine(pairs)


def test_swapped_tensors_are_seen():
    assert combine([("a", "1"), ("b", "2")]) != combine([("a", "2"), ("b", "1")])


def test_a_name_twice_is_an_error():
    with pytest.raises(ValueError, match="a occurs twice"):
        combine([("a", "1"), ("a", "1")])
