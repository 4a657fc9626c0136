"""Which rows of which tensor another tensor was copied from.

`TokenBatch.select` copies the rows of whole sequences. Processes that already have the tensor they
were copied from are sent the places of the rows, not the rows.
Promises: a source is remembered weakly and beside the tensors: it keeps neither of the two alive,
is no part of a batch, and is not pickled. It holds for this very tensor: a column that is added to
a selection has none, nor has a tensor that was written to since, or whose source was.
Does not promise: to notice writes past torch: through a numpy array of the same memory, or `.data`.
Letters: B sequences, N rows of a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

Spans = NDArray[np.int64]
"""(B, 2): of each sequence its first row, and the row behind its last."""


@dataclass(frozen=True)
class Source:
    """Where the rows of a tensor can be read.

    Attributes:
        whole: a tensor that has them, perhaps among others.
        spans_B2: the sequences' rows in `whole`.
    """

    whole: Tensor
    spans_B2: Spans


@dataclass(frozen=True)
class _Origin:
    whole: TensorWeakRef
    spans_B2: Spans
    versions: tuple[int, int]
    """Of the tensor and of `whole`; a write in place counts one up."""


_ORIGINS = WeakTensorKeyDictionary()


def spans_of(ends: Tensor) -> Spans:
    """The rows of sequences that lie end to end.

    Args:
        ends: (B + 1,) cumulative numbers of rows, on the CPU; starts at 0.

    Returns:
        (B, 2) int64.
    """
    ends_numpy = ends.numpy().astype(np.int64)
    return np.stack([ends_numpy[:-1], ends_numpy[1:]], axis=1)


def source_of(tensor: Tensor, spans_B2: Spans) -> Source:
    """What the rows of a tensor were selected from.

    Args:
        tensor: (N, ...) of sequences that lie end to end.
        spans_B2: their rows in it.

    Returns:
        The tensor that the first of several selections was made of, where that is still alive;
        otherwise `tensor` itself.
    """
    origin: _Origin | None = _ORIGINS.get(tensor)
    whole = None if origin is None else origin.whole()
    if origin is None or whole is None or origin.versions != _versions(tensor, whole):
        return Source(tensor, spans_B2)
    # The same tensor may be in a batch that cuts it into other sequences.
    if not np.array_equal(np.diff(origin.spans_B2), np.diff(spans_B2)):
        return Source(tensor, spans_B2)
    return Source(whole, origin.spans_B2)


class RowSelection:
    """Copies the rows of some sequences from tensors of one layout, and remembers their source.

    Args:
        index_N: rows to copy, those of `sequences` in their order.
        ends: (B + 1,) as of `spans_of`, on the device of the tensors.
        sequences: that are selected.
    """

    def __init__(self, index_N: Tensor, ends: Tensor, sequences: Sequence[int]) -> None:
        self._index_N = index_N
        # A copy from a device would wait for it, and no process is sent what lies there.
        self._spans_B2 = spans_of(ends) if ends.is_cpu else None
        self._sequences = list(sequences)
        self._chosen: dict[int, Spans] = {}

    def of(self, whole: Tensor) -> Tensor:
        """The rows of one tensor: a copy."""
        part = whole[self._index_N]
        if self._spans_B2 is not None and whole.is_cpu and not whole.is_inference():
            source = source_of(whole, self._spans_B2)
            # Tensors of one source share their spans, which are then pickled once.
            key = id(source.spans_B2)
            if key not in self._chosen:
                self._chosen[key] = source.spans_B2[self._sequences]
            versions = _versions(part, source.whole)
            _ORIGINS[part] = _Origin(TensorWeakRef(source.whole), self._chosen[key], versions)
        return part


def version_of(tensor: Tensor) -> int:
    """A number that every write in place changes; 0 of a tensor of inference mode, without one."""
    return 0 if tensor.is_inference() else tensor._version


def _versions(tensor: Tensor, whole: Tensor) -> tuple[int, int]:
    return version_of(tensor), version_of(whole)
