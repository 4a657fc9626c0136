"""What passes has the receiver's dtype, its checksum is that of what passed."""

import pytest
import torch

from engines.checksum import combine, tensor_checksum
from engines.errors import WeightSyncError
from engines.weight_sync.buckets import CastStream

TENSORS = {
    "weight": torch.linspace(-1, 1, 12).reshape(3, 4),
    "bias": torch.tensor([0.1, 0.2]),
    "longer": torch.linspace(0, 1, 40).reshape(5, 8).t(),
    "scalar": torch.tensor(0.3),
    "empty": torch.zeros(0, 4),
    "steps": torch.tensor([3, 4]),
    "half": torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
}


def stream(dtype, names=()):
    return CastStream(iter(TENSORS.items()), dtype, names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_floats_except_those_named(dtype):
    cast = stream(dtype, {"bias", "half"})
    passed = {name: tensor.clone() for name, tensor in cast}
    expected = {
        "weight": dtype, "bias": torch.float32, "longer": dtype, "scalar": dtype,
        "empty": dtype, "steps": torch.int64, "half": torch.float32,
    }  # fmt: skip
    assert {name: tensor.dtype for name, tensor in passed.items()} == expected
    assert all(torch.equal(passed[n], TENSORS[n].to(expected[n])) for n in TENSORS)
    assert cast.sent.digest == combine((n, tensor_checksum(t)) for n, t in passed.items())
    assert cast.sent.num_tensors == len(TENSORS)
    assert cast.sent.num_bytes == sum(t.numel() * t.element_size() for t in passed.values())


def test_what_needs_no_cast_is_not_copied():
    for name, tensor in stream(torch.float32):
        if name != "half":
            assert tensor.data_ptr() == TENSORS[name].data_ptr()


def test_a_tensor_stays_while_the_next_is_made():
    """A receiver in another thread may still be reading it."""
    cast = CastStream(iter([("a", torch.ones(9)), ("b", torch.zeros(9))]), torch.bfloat16)
    (_, first), _ = next(cast), next(cast)
    assert torch.equal(first, torch.ones(9, dtype=torch.bfloat16))


def test_a_name_twice_is_refused():
    cast = CastStream(iter([("a", torch.ones(1)), ("a", torch.ones(1))]), torch.float32)
    next(cast)
    with pytest.raises(WeightSyncError, match="a: the training engine sent it twice"):
        next(cast)
