"""Guards and reductions; the collectives themselves run in tests/contracts/test_backend.py."""

import math
from collections.abc import Iterator

import pytest
import torch

from engines.training import collectives
from hardware.cpu import CPUPlatform

CPU = torch.device("cpu")


@pytest.fixture
def _group() -> Iterator[None]:
    collectives.init_single_process_group(CPUPlatform(), 30.0)
    yield
    collectives.close_process_group()


def test_without_a_group_there_is_one_rank() -> None:
    assert (collectives.world_size(), collectives.rank()) == (1, 0)
    assert collectives.gather_rows([1.5, 2.0**53], CPU) == [[1.5, 2.0**53]]
    collectives.close_process_group()


@pytest.mark.usefixtures("_group")
def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    strided = torch.arange(6.0).view(2, 3).t()
    for collective in (collectives.all_reduce_sum, collectives.broadcast):
        with pytest.raises(ValueError, match="non-contiguous"):
            collective(strided)
    whole = strided.contiguous()
    collectives.all_reduce_sum(whole)
    collectives.broadcast(whole)
    assert torch.equal(whole, strided)


def test_columns() -> None:
    rows = [[1.0, 2.0, math.nan], [4.0, -3.0, 1.0]]
    assert collectives.column_sums(rows)[:2] == [5.0, -1.0]
    assert collectives.column_maxima(rows)[:2] == [4.0, 2.0]
    assert math.isnan(collectives.column_maxima(rows)[2])
    assert math.isnan(collectives.column_maxima(rows[::-1])[2])
