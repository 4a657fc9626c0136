"""Rectangular parts of tensors into sharded files and out again, by any other cut."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import collectives
from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.sharded import (
    Region,
    ShardedReader,
    load_sharded,
    own_regions,
    save_regions,
    stage_regions,
)
from engines.errors import CheckpointError


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 7), cuts=st.lists(st.integers(0, 9), max_size=4),
    data=st.data(),
)  # fmt: skip
def test_any_part_reads_back(rows: int, columns: int, cuts: list[int], data: st.DataObject) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    bounds = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    top, bottom = sorted(data.draw(st.tuples(st.integers(0, rows - 1), st.integers(1, rows))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, columns - 1), st.integers(1, columns))))
    bottom, right = max(bottom, top + 1), max(right, left + 1)
    with tempfile.TemporaryDirectory() as path:
        save_regions(
            Path(path),
            (Region("w", (a, 0), whole[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)),
        )
        reader = ShardedReader(Path(path))
        part = reader.read_region("w", (top, left), (bottom - top, right - left))
        assert torch.equal(part, whole[top:bottom, left:right])
        assert torch.equal(reader.read("w"), whole)
        filled = torch.zeros_like(whole)
        load_sharded(Path(path), {"w": filled})
        assert torch.equal(filled, whole)


def test_ranks_that_hold_copies_share_the_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.zeros(2) for name in "abcd"}
    monkeypatch.setattr(collectives, "gather_texts", lambda text: [text, text])
    written: list[str] = []
    for number in range(2):
        monkeypatch.setattr(collectives, "rank", lambda number=number: number)
        own = [region.name for region in own_regions(tensors)]
        assert len(own) == 2
        written += own
    assert sorted(written) == sorted(tensors)


def test_a_hole_is_an_error(tmp_path: Path) -> None:
    save_regions(
        tmp_path, [Region("w", (0, 0), torch.ones(2, 3)), Region("w", (3, 0), torch.ones(1, 3))]
    )
    with pytest.raises(CheckpointError, match="pieces of w are missing"):
        ShardedReader(tmp_path).read_region("w", (1, 0), (2, 3))


def test_a_failing_disk_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    """What makes the regions is collective: it is walked to its end all the same."""
    made: list[int] = []

    def walk() -> Iterator[Region]:
        for i in range(3):
            made.append(i)
            yield Region(f"w{i}", (0,), torch.ones(1))

    with pytest.raises(OSError, match="No such file"):
        save_regions(tmp_path / "absent" / "tensors", walk())
    assert made == [0, 1, 2]


def test_error_other_than_the_disk_does_not_leave_ranks_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def walk() -> Iterator[Region]:
        for i in range(3):
            made.append(i)
            yield Region(f"w{i}", (0,), torch.ones(1))

    def refuse(*_: object) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(StagingBuffers, "copy", refuse)
    with pytest.raises(MemoryError):  # one rank alone has the error itself
        stage_regions(tmp_path, walk(), StagingBuffers())
    assert made == [0, 1, 2]


def test_ranks_that_hold_copies_share_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.zeros(9), "b": torch.zeros(1), "c": torch.zeros(9), "d": torch.zeros(1)}
    monkeypatch.setattr(collectives, "gather_texts", lambda text: [text, text])
    num_bytes = []
    for number in range(2):
        monkeypatch.setattr(collectives, "rank", lambda number=number: number)
        num_bytes.append(sum(region.values.nbytes for region in own_regions(tensors)))
    assert num_bytes == [40, 40]
