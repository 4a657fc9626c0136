"""The rows of a split on disk while they are checked: what is compared of them is in memory.

    with RowWriter(path, RL_FORMAT) as writer:
        writer.add(row)
    rows = writer.stored()

Promises: rows come back as they were added and in that order; in memory are, per row, 16 bytes of
its prompt's digest, 4 of its data source and 1 that says whether it is kept, and of the rows
themselves one batch; their images lie beside them, each once. Prompts with equal digests (BLAKE2b,
128 bits) count as equal.
Does not promise: that the file can be read by another version; it is gone when the data set is
written. A sample in another order takes 24 bytes of each row while it is drawn, and a source that
drops duplicates about 100.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Generic

import numpy as np
import pyarrow as pa

from engines.data.images.store import ImageFolder, keep_images
from engines.data.read.row_files import BATCH_ROWS, RowFormat, RowT
from engines.data.read.rows import Message, RLRow

_DIGEST_BYTES = 16
_MIN_RUN_ROWS = 16 * BATCH_ROWS
_RUN_BYTES = 256 * 2**20
_MAX_RUNS = 128
"""Files that are open at a time."""


@dataclass(frozen=True, eq=False)
class StoredRows(Generic[RowT]):
    """Rows of a file, all or some. Iterating makes them anew.

    Attributes:
        path: Arrow's file format.
        format: of the rows.
        prompts: (N, 2) uint64, the digest of each stored row's prompt.
        sources: (N,) int32, the place of its data source in `data_sources`.
        data_sources: names.
        kept: (N,) bool, whether the row is one of these rows.
        is_plain: whether all stored rows are, without tools, calls and images.
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
        """The columns of these rows, none of the batches empty."""
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
        """The digests of the images of these rows, in their order; some come again."""
        if not self.is_plain and "images" in self.format.schema.names:
            for batch in self.batches():
                yield from batch.column("images").flatten().to_pylist()

    def only(self, chosen: np.ndarray) -> "StoredRows[RowT]":
        """Some of these rows.

        Args:
            chosen: (len(self),) bool.

        Returns:
            They, in their order.
        """
        kept = self.kept.copy()
        kept[self.kept] = chosen
        return replace(self, kept=kept)

    def prompt_digests(self) -> Iterator[bytes]:
        """The digest of each row's prompt; see `prompt_digest`."""
        digests = self.prompts[self.kept].tobytes()
        for start in range(0, len(digests), _DIGEST_BYTES):
            yield digests[start : start + _DIGEST_BYTES]

    def num_distinct_prompts(self) -> int:
        """Rows that differ in their prompt."""
        digests = self.prompts[self.kept]
        ordered = digests[np.lexsort((digests[:, 0], digests[:, 1]))]
        return int((ordered[1:] != ordered[:-1]).any(axis=1).sum()) + bool(len(ordered))

    def num_by_source(self) -> dict[str, int]:
        """Rows by data source, sorted by name; a source without a row is left out."""
        counts = np.bincount(self.sources[self.kept], minlength=len(self.data_sources)).tolist()
        pairs = zip(self.data_sources, counts, strict=True)
        return dict(sorted((name, count) for name, count in pairs if count))


class RowWriter(Generic[RowT]):
    """Takes rows to disk.

    Args:
        path: of the file.
        format: of the rows.
    """

    def __init__(self, path: Path, format: RowFormat[RowT]) -> None:
        self._path, self._format = path, format
        self._files = ExitStack()
        self._waiting: list[RowT] = []
        self._prompts = bytearray()
        self._sources = array("i")
        self._places: dict[str, int] = {}
        self._is_plain = True

    def __enter__(self) -> "RowWriter[RowT]":
        self._writer = self._files.enter_context(_writing(self._path, self._format.schema))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._files:
            if kind is None:
                self._flush()

    def add(self, row: RowT) -> None:
        """The next row."""
        if isinstance(row, RLRow):
            row = keep_images(row, image_folder(self._path))
        self._waiting.append(row)
        self._prompts += prompt_digest(row.prompt)
        self._sources.append(self._places.setdefault(row.data_source, len(self._places)))
        if len(self._waiting) == BATCH_ROWS:
            self._flush()

    def add_sample(self, rows: StoredRows[RowT], order: np.ndarray) -> None:
        """Rows that were stored, whole.

        Args:
            rows: all rows of their file.
            order: their numbers as they are to follow, each at most once, (M,) int64.
        """
        self._flush()
        self._is_plain = self._is_plain and rows.is_plain
        self._prompts += rows.prompts[order].tobytes()
        names = [self._places.setdefault(n, len(self._places)) for n in rows.data_sources]
        self._sources.extend(np.array(names, np.int32)[rows.sources[order]].tolist())
        for batch in _reordered(rows, order):
            self._writer.write_batch(batch)

    def stored(self) -> StoredRows[RowT]:
        """The rows, once the writer is closed."""
        sources = np.array(self._sources, np.int32)
        return StoredRows(
            path=self._path,
            format=self._format,
            prompts=np.frombuffer(self._prompts, np.uint64).reshape(-1, 2),
            sources=sources,
            data_sources=tuple(self._places),
            kept=np.ones(len(sources), bool),
            is_plain=self._is_plain,
        )

    def _flush(self) -> None:
        if self._waiting:
            batch = self._format.batch(self._waiting)
            self._is_plain = self._is_plain and self._format.is_plain(batch)
            self._writer.write_batch(batch)
            self._waiting = []


def image_folder(path: Path) -> ImageFolder:
    """Where the images of stored rows lie: beside them, each once for all files of a directory."""
    return ImageFolder(path.parent / "images")


def stored(path: Path, format: RowFormat[RowT], rows: Iterable[RowT]) -> StoredRows[RowT]:
    """Take rows to disk.

    Args:
        path: of the file.
        format: of the rows.
        rows: read once.

    Returns:
        They.
    """
    with RowWriter(path, format) as writer:
        for row in rows:
            writer.add(row)
    return writer.stored()


def prompt_digest(prompt: Iterable[Message]) -> bytes:
    """What prompts have in common that differ in nothing but white space around their messages.

    The tools that are offered do not count.

    Args:
        prompt: its messages; no text of a row holds NUL.

    Returns:
        16 bytes.
    """
    return digest_of(part for each in prompt for part in (each.role, each.said.strip()))


def digest_of(texts: Iterable[str]) -> bytes:
    """16 bytes that lists of texts without NUL have in common only if they are equal."""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=_DIGEST_BYTES).digest()


def _reordered(rows: StoredRows[RowT], order: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Batches in an order: the rows are dealt out to runs of it, each of which fits memory."""
    # As many runs as keep one small, whether rows are many or long.
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
        # The rows of a run lie there as in the file: the n-th smallest number at place n.
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
    """Not mapped: what was read of a mapped file counts as the memory of the process."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
        yield reader
