"""Guards and reductions; the collectives themselves run in tests/contracts/test_backend.py."""

import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from engines import collectives
from engines.errors import CollectiveError
from hardware.cpu import CPUPlatform

CPU = torch.device("cpu")
TIMEOUT_S = 2.0
GROUP_TIMEOUT_S = 600.0
HANG_S = 60.0
"""Longer than it takes to notice after `TIMEOUT_S`, and no more than a trifle of the other."""


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
    for collective in (collectives.all_reduce, collectives.broadcast):
        with pytest.raises(ValueError, match="non-contiguous"):
            collective(strided)
    with pytest.raises(ValueError, match=r"got torch.int16; send tensor.view\(torch.uint8\)"):
        collectives.all_gather(torch.zeros(2, dtype=torch.int16))
    whole = strided.contiguous()
    collectives.all_reduce(whole)
    collectives.broadcast(whole)
    assert torch.equal(whole, strided)


def test_numbers_of_all_ranks_however_many_each_has(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)  # pyright: ignore[reportPrivateImportUsage]
    own = [torch.tensor([1.5, 2.0**53 - 1], dtype=torch.float64), torch.zeros(0), torch.ones(1)]

    def rank(index: int) -> torch.Tensor:
        gloo = dist.ProcessGroupGloo(store, index, 3, timedelta(seconds=30))
        return collectives.gather_ragged(own[index], CPU, cast(dist.ProcessGroup, gloo))

    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(rank, range(3)))
    assert [each.tolist() for each in found] == [[1.5, 2.0**53 - 1, 1.0]] * 3
    assert collectives.gather_ragged(torch.zeros(0), CPU).tolist() == []


def test_columns() -> None:
    rows = [[1.0, 2.0, math.nan], [4.0, -3.0, 1.0]]
    assert collectives.column_sums(rows)[:2] == [5.0, -1.0]
    assert collectives.column_maxima(rows)[:2] == [4.0, 2.0]
    assert math.isnan(collectives.column_maxima(rows)[2])
    assert math.isnan(collectives.column_maxima(rows[::-1])[2])


def _rank(rank: int, root: str, leaves: bool) -> None:
    """One of two; the second does not come to the collective, or comes with another size."""
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )  # fmt: skip
    group = dist.new_group([0, 1], group_desc="tensor")
    collectives.limit_waits(TIMEOUT_S)
    begin = time.monotonic()
    if rank == 0:
        try:
            collectives.all_reduce(torch.zeros(3), group)
        except CollectiveError as error:
            Path(root, "text").write_text(str(error))
            Path(root, "seconds").write_text(str(time.monotonic() - begin))
    elif not leaves:
        time.sleep(3 * TIMEOUT_S)


@pytest.mark.parametrize("leaves", [False, True], ids=["silent", "gone"])
def test_missing_rank_times_out_and_the_group_is_named(leaves: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path), leaves)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(GROUP_TIMEOUT_S / 2)
        process.kill()
    text = (tmp_path / "text").read_text()
    assert text.startswith(
        "all_reduce of (3,) float32 failed in group tensor (gloo, ranks 0, 1; this is rank 0): "
    )
    assert float((tmp_path / "seconds").read_text()) < HANG_S
