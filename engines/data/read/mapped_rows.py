"""Random access to the rows of a file that is larger than memory.

A parquet row group can only be read whole. So the rows are copied once, uncompressed, to a scratch
file, from which a read loads a few rows. It has no name, so it disappears with the process. If the
disk is too small for it, the operating system's error is raised.
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
    """The rows of a file, each read on access; `scratch_dir` needs room for their text."""

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
        """Free the scratch file; afterwards rows can only be iterated."""
        self._scratch.close()

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[RowT]:
        return iter(self._rows)

    def at(self, place: int) -> RowT:
        """Read one row."""
        number = bisect_right(self._starts, place) - 1
        batch = self._file.get_batch(number)
        [columns] = batch.slice(place - self._starts[number], 1).to_pylist()
        return self._rows.parse(place, columns)
