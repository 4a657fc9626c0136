"""Rows of a file by their places, where the file is larger than memory.

A row group of a parquet file is read whole or not at all. Rows that are asked for in any order are
copied once, as uncompressed columns, to a scratch file, of which a read takes a few rows.
Promises: the rows of the file, equal and in its order; of them none stays in memory; the scratch
file has no name, so it is gone with its process, however that ends.
Does not promise: a disk that has room for the text of the rows; the operating system's error says
so.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Generic

import pyarrow as pa

from engines.data.read.by_place import ByPlace
from engines.data.read.row_files import RowFile, RowT

_ROWS_PER_READ = 64


class MappedRows(ByPlace[RowT], Generic[RowT]):
    """The rows of a file.

    Args:
        rows: the file.
        scratch_dir: on a disk with room for the text of the rows.
    """

    def __init__(self, rows: RowFile[RowT], scratch_dir: Path) -> None:
        self._rows = rows
        self._starts = [0]
        self._scratch = tempfile.TemporaryFile(dir=scratch_dir)  # noqa: SIM115
        with pa.ipc.new_file(pa.PythonFile(self._scratch, "w"), rows.schema) as file:
            for batch in rows.batches():
                for start in range(0, batch.num_rows, _ROWS_PER_READ):
                    few = batch.slice(start, _ROWS_PER_READ)
                    file.write_batch(few)
                    self._starts.append(self._starts[-1] + few.num_rows)
        self._scratch.seek(0)
        self._file = pa.ipc.open_file(pa.PythonFile(self._scratch, "r"))

    def close(self) -> None:
        """Give the scratch file back to the disk; no row can be asked for by its place then."""
        self._scratch.close()

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[RowT]:
        return iter(self._rows)

    def at(self, place: int) -> RowT:
        """One row, read now."""
        number = bisect_right(self._starts, place) - 1
        batch = self._file.get_batch(number)
        [columns] = batch.slice(place - self._starts[number], 1).to_pylist()
        return self._rows.parse(place, columns)
