"""Checksums tell apart everything that differs, and nothing that does not."""

import hashlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.checksum import combine, tensor_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def test_the_definition_computed_from_numpy_bytes():
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    expected = hashlib.blake2b(b"torch.float32(2, 3)" + array.tobytes(), digest_size=16)
    assert tensor_checksum(torch.from_numpy(array)) == expected.hexdigest()


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
