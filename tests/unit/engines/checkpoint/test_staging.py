"""Host memory is reused from checkpoint to checkpoint, and never under a pending write."""

from collections.abc import Callable
from pathlib import Path

import torch

from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.sharded import ShardedReader, own_regions, stage_regions


def test_a_buffer_is_lent_once_at_a_time() -> None:
    buffers = StagingBuffers()
    value = torch.arange(6.0).view(2, 3).t()
    first = buffers.copy("w", value)
    second = buffers.copy("w", value + 1)
    assert first.is_contiguous()
    assert torch.equal(first, value)
    assert torch.equal(second, value + 1)
    assert first.data_ptr() != second.data_ptr()
    buffers.give_back("w", first)
    assert buffers.copy("w", value).data_ptr() == first.data_ptr()


def test_a_buffer_of_another_shape_or_dtype_is_not_reused() -> None:
    buffers = StagingBuffers()
    buffers.give_back("w", torch.zeros(3))
    assert buffers.copy("w", torch.ones(4)).tolist() == [1.0] * 4
    buffers.give_back("w", torch.zeros(3))
    assert buffers.copy("w", torch.ones(3, dtype=torch.int64)).dtype == torch.int64


def test_two_checkpoints_in_flight_hold_their_own_values(tmp_path: Path) -> None:
    buffers = StagingBuffers()
    weight = torch.zeros(4)
    paths = [tmp_path / name for name in ("first", "second", "third")]
    writes: list[Callable[[], None]] = []
    for number, path in enumerate(paths):
        path.mkdir()
        if number == 2:
            for write in writes:  # the third takes memory that these give back
                write()
        weight.fill_(float(number))
        writes.append(stage_regions(path, own_regions({"w": weight}), buffers))
    weight.fill_(-1.0)
    writes[2]()
    for number, path in enumerate(paths):
        assert ShardedReader(path).read("w").tolist() == [float(number)] * 4
