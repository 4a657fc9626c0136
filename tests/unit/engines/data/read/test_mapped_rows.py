"""Rows by their places are the rows of the file, and none of them stays in memory."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from loaded_rows import write_rows

from engines.data.read.lazy_sequence import MappedRows
from engines.data.read.row_files import RL_FORMAT, RowFile
from engines.data.read.rows import Message, RewardModel, RLRow, RowError
from infra.errors import ConfigError

NUM_ROWS = 2_500
"""More than one batch of the file, and no multiple of what is read at a time."""


def row(number: int) -> RLRow:
    return RLRow(
        f"source {number % 3}",
        (Message("user", f"{number}?"),),
        "",
        RewardModel("rule", number),
        {"level": [number]} if number % 2 else {},
    )


@pytest.fixture
def file(tmp_path: Path) -> RowFile[RLRow]:
    write_rows(tmp_path / "rl.parquet", RL_FORMAT, map(row, range(NUM_ROWS)))
    return RowFile(tmp_path / "rl.parquet", RL_FORMAT)


def test_each_row_is_at_its_place(file: RowFile[RLRow], tmp_path: Path) -> None:
    with closing(MappedRows(file, tmp_path)) as rows:
        assert len(rows) == NUM_ROWS
        for place in (0, 63, 64, 1023, 1024, 1987, NUM_ROWS - 1):
            assert rows[place] == row(place)
        assert rows[-1] == row(NUM_ROWS - 1)
        assert list(rows[1020:1030:3]) == [row(place) for place in range(1020, 1030, 3)]
        with pytest.raises(IndexError):
            rows[NUM_ROWS]
        assert list(rows) == [row(place) for place in range(NUM_ROWS)]


def test_no_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "rl.parquet", RL_FORMAT, ())
    with closing(MappedRows(RowFile(tmp_path / "rl.parquet", RL_FORMAT), tmp_path)) as rows:
        assert (len(rows), list(rows)) == (0, [])


def test_the_scratch_file_has_no_name_and_goes_with_the_rows(
    file: RowFile[RLRow], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = set(os.listdir("/proc/self/fd"))
    rows = MappedRows(file, scratch)
    assert list(scratch.iterdir()) == []
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    rows.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_row_that_is_none_is_named(file: RowFile[RLRow], tmp_path: Path) -> None:
    def parse(_: object) -> RLRow:
        raise RowError("got no row")

    broken = RowFile(file.path, replace(RL_FORMAT, parse=parse))
    with (
        closing(MappedRows(broken, tmp_path)) as rows,
        pytest.raises(ConfigError, match=r"rl\.parquet row 70: got no row"),
    ):
        rows[70]
