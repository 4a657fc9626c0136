"""Keep a split's rows on disk while they are checked, with digests to compare in memory.

    with writing_rows(path, RL_FORMAT) as writer:
        writer.add(row)
    rows = writer.stored()

Promises: rows come back as added and in that order. In memory are one batch of rows, or a run file
of a sample, and per row 21 bytes: the prompt's digest, data source and selection. Images are files
beside the rows, each stored once. Prompts with equal digests (BLAKE2b, 128 bits) count as equal.
Does not promise: a stable format; the file is deleted once the data set is written.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic

import numpy as np
import pyarrow as pa

from engines.data.image_store import keep_images
from engines.data.read.row_files import BATCH_ROWS, RowFormat, RowT
from engines.data.read.rows import Message, RLRow

_DIGEST_BYTES = 16
_MIN_RUN_ROWS = 16 * BATCH_ROWS
_RUN_BYTES = 256 * 2**20
_MAX_RUNS = 128
"""Limit of run files, all of which are open at the same time."""


@dataclass(frozen=True, eq=False)
class StoredRows(Generic[RowT]):
    """Rows of an Arrow file, all or some, read anew by each iteration.

    Attributes:
        prompts: (N, 2) uint64, digest of each stored row's prompt.
        sources: (N,) int32, index into `data_sources` of each stored row.
        kept: (N,) bool, True for the rows that belong to this object.
        is_plain: no stored row has tools, calls or images.
    """

    path: Path
    format: RowFormat[RowT]
    prompts: np.ndarray
    sources: np.ndarray
    data_sources: tuple[str, ...]
    kept: np.ndarray
    is_plain: bool

    def __len__(self) -> int:
        return int(np.count_nonzero(self.kept))

    def __iter__(self) -> Iterator[RowT]:
        for batch in self.batches():
            yield from map(self.format.parse, batch.to_pylist())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the columns of the kept rows in batches, none of them empty."""
        start = 0
        with _reading(self.path) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                kept = self.kept[start : start + batch.num_rows]
                start += batch.num_rows
                if kept.all():
                    yield batch
                elif kept.any():
                    yield batch.filter(pa.array(kept))

    def images(self) -> Iterator[str]:
        """Yield the digests of the rows' images in order, with repetitions."""
        if not self.is_plain and "images" in self.format.schema.names:
            for batch in self.batches():
                yield from batch.column("images").flatten().to_pylist()

    def only(self, places: Sequence[int] | np.ndarray) -> "StoredRows[RowT]":
        """Return the rows at `places`, which are ascending indices without repetition."""
        kept = np.zeros_like(self.kept)
        kept[np.flatnonzero(self.kept)[places]] = True
        return replace(self, kept=kept)

    def prompt_digests(self) -> Iterator[bytes]:
        """Yield the digest of each row's prompt; see `prompt_digest`."""
        digests = self.prompts[self.kept].tobytes()
        for start in range(0, len(digests), _DIGEST_BYTES):
            yield digests[start : start + _DIGEST_BYTES]

    def num_distinct_prompts(self) -> int:
        """Return the number of distinct prompts."""
        digests = self.prompts[self.kept]
        ordered = digests[np.lexsort((digests[:, 0], digests[:, 1]))]
        return int((ordered[1:] != ordered[:-1]).any(axis=1).sum()) + bool(len(ordered))

    def num_by_source(self) -> dict[str, int]:
        """Return the number of rows by data source, sorted by name, without zeros."""
        counts = np.bincount(self.sources[self.kept], minlength=len(self.data_sources)).tolist()
        return {name: n for name, n in sorted(zip(self.data_sources, counts, strict=True)) if n}


class RowWriter(Generic[RowT]):
    """Writes rows to a file; see `writing_rows`."""

    def __init__(
        self, path: Path, format: RowFormat[RowT], writer: pa.ipc.RecordBatchFileWriter
    ) -> None:
        self._path, self._format, self._writer = path, format, writer
        self._waiting: list[RowT] = []
        self._prompts = bytearray()
        self._sources = array("i")
        self._places: dict[str, int] = {}
        self._is_plain = True

    def add(self, row: RowT) -> None:
        """Append a row; its images go to the image folder."""
        if isinstance(row, RLRow):
            row = keep_images(row, image_folder(self._path))
        self._waiting.append(row)
        self._prompts += prompt_digest(row.prompt)
        self._sources.append(self._places.setdefault(row.data_source, len(self._places)))
        if len(self._waiting) == BATCH_ROWS:
            self._flush()

    def add_sample(self, rows: StoredRows[RowT], order: np.ndarray) -> None:
        """Append rows of an unfiltered `rows` in `order`, which are (M,) distinct int64 indices."""
        self._flush()
        self._is_plain = self._is_plain and rows.is_plain
        self._prompts += rows.prompts[order].tobytes()
        names = [self._places.setdefault(n, len(self._places)) for n in rows.data_sources]
        self._sources.extend(np.array(names, np.int32)[rows.sources[order]].tolist())
        for batch in _reordered(rows, order):
            self._writer.write_batch(batch)

    def stored(self) -> StoredRows[RowT]:
        """Return the written rows; call it after the scope of `writing_rows`."""
        return StoredRows(
            path=self._path,
            format=self._format,
            prompts=np.frombuffer(self._prompts, np.uint64).reshape(-1, 2),
            sources=np.array(self._sources, np.int32),
            data_sources=tuple(self._places),
            kept=np.ones(len(self._sources), bool),
            is_plain=self._is_plain,
        )

    def _flush(self) -> None:
        if self._waiting:
            batch = self._format.batch(self._waiting)
            self._is_plain = self._is_plain and self._format.is_plain(batch)
            self._writer.write_batch(batch)
            self._waiting = []


@contextmanager
def writing_rows(path: Path, format: RowFormat[RowT]) -> Iterator[RowWriter[RowT]]:
    """Scope of a `RowWriter` to a new file, which is complete after the scope."""
    with _writing(path, format.schema) as file:
        writer = RowWriter(path, format, file)
        yield writer
        writer._flush()


def image_folder(path: Path) -> Path:
    """Return the folder of the images of stored rows, shared by all files of a directory."""
    return path.parent / "images"


def stored(path: Path, format: RowFormat[RowT], rows: Iterable[RowT]) -> StoredRows[RowT]:
    """Write rows to disk and return them for reading."""
    with writing_rows(path, format) as writer:
        for row in rows:
            writer.add(row)
    return writer.stored()


def prompt_digest(prompt: Iterable[Message]) -> bytes:
    """Return a 16-byte digest of roles and texts, ignoring outer white space and offered tools."""
    return digest_of(part for each in prompt for part in (each.role, each.said.strip()))


def digest_of(texts: Iterable[str]) -> bytes:
    """Return a 16-byte digest of a list of texts without NUL."""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=_DIGEST_BYTES).digest()


def _reordered(rows: StoredRows[RowT], order: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield batches in `order`: rows go to run files, which are then in memory one at a time."""
    # Enough runs to keep each small, whether rows are many or long.
    num_runs = max(len(order) // _MIN_RUN_ROWS, rows.path.stat().st_size // _RUN_BYTES, 1)
    run_rows = max(1, -(-len(order) // min(num_runs, _MAX_RUNS)))
    paths = [
        rows.path.with_suffix(f".{number}.run") for number in range(-(-len(order) // run_rows))
    ]
    runs = np.full(len(rows), -1)
    runs[order] = np.arange(len(order)) // run_rows
    with ExitStack() as stack:
        writers = [stack.enter_context(_writing(path, rows.format.schema)) for path in paths]
        start = 0
        for batch in rows.batches():
            of_batch = runs[start : start + batch.num_rows]
            start += batch.num_rows
            places = np.argsort(of_batch, kind="stable")
            by_run = batch.take(pa.array(places))
            ends = np.searchsorted(of_batch[places], np.arange(-1, len(paths)), side="right")
            for writer, begin, end in zip(writers, ends[:-1], ends[1:], strict=True):
                if begin < end:
                    writer.write_batch(by_run.slice(begin, end - begin))
    for run, path in enumerate(paths):
        with _reading(path) as reader:
            table = reader.read_all()
        # A run keeps the order of the file: the n-th smallest row number is at place n.
        places = np.argsort(np.argsort(order[run * run_rows : (run + 1) * run_rows]))
        for start in range(0, len(places), BATCH_ROWS):
            part = table.take(pa.array(places[start : start + BATCH_ROWS]))
            yield from part.combine_chunks().to_batches()
        path.unlink()


@contextmanager
def _writing(path: Path, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        yield writer


@contextmanager
def _reading(path: Path) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """Open an Arrow file without memory mapping, whose pages count as memory of the process."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
        yield reader
