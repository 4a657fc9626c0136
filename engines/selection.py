"""Records which rows of which tensor another tensor was copied from.

`TokenBatch.select` copies the rows of whole sequences. Processes that already have the source
tensor are sent the positions of the rows instead of the rows.
Promises: sources are held by weak references outside the tensors: they keep no tensor alive, are
not part of a batch and are not pickled. A record is for one tensor object: a column added to a
selection has none, and a write to the tensor or its source invalidates it.
Does not promise to notice writes that bypass torch (a numpy array of the same memory, `.data`).
Letters: B sequences, N rows of a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

Spans = NDArray[np.int64]
"""(B, 2): first row of each sequence, and the row after its last."""


@dataclass(frozen=True)
class Source:
    """Origin of a tensor's rows: the rows `spans_B2` of the tensor `whole`."""

    whole: Tensor
    spans_B2: Spans


@dataclass(frozen=True)
class _Origin:
    whole: TensorWeakRef
    spans_B2: Spans
    versions: tuple[int, int]
    """Versions of the tensor and of `whole`; every in-place write increments one."""


_ORIGINS = WeakTensorKeyDictionary()


def spans_of(ends: Tensor) -> Spans:
    """Return (B, 2) int64 row spans from (B + 1,) cumulative row counts on the CPU."""
    ends_numpy = ends.numpy().astype(np.int64)
    return np.stack([ends_numpy[:-1], ends_numpy[1:]], axis=1)


def source_of(tensor: Tensor, spans_B2: Spans) -> Source:
    """Return the tensor that the rows `spans_B2` of a tensor were selected from.

    After several selections this is the first source. It is `tensor` itself if the tensor was not
    selected, the source is freed, or either was written to.
    """
    origin: _Origin | None = _ORIGINS.get(tensor)
    whole = None if origin is None else origin.whole()
    if (
        origin is None
        or whole is None
        or origin.versions != (version_of(tensor), version_of(whole))
        # Another batch may cut the same tensor into other sequences.
        or not np.array_equal(np.diff(origin.spans_B2), np.diff(spans_B2))
    ):
        return Source(tensor, spans_B2)
    return Source(whole, origin.spans_B2)


class RowSelection:
    """Copies the rows `index_N` of some sequences from tensors of one layout; records the source.

    `ends` is as for `spans_of`, on the device of the tensors.
    """

    def __init__(self, index_N: Tensor, ends: Tensor, sequences: Sequence[int]) -> None:
        self._index_N = index_N
        # Reading `ends` from a device would synchronize, and device tensors are never sent.
        self._spans_B2 = spans_of(ends) if ends.is_cpu else None
        self._sequences = list(sequences)
        self._chosen: dict[int, Spans] = {}

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of the rows of one tensor."""
        part = whole[self._index_N]
        if self._spans_B2 is not None and whole.is_cpu and not whole.is_inference():
            source = source_of(whole, self._spans_B2)
            # Tensors of one source share their spans object, which is then pickled once.
            key = id(source.spans_B2)
            if key not in self._chosen:
                self._chosen[key] = source.spans_B2[self._sequences]
            versions = version_of(part), version_of(source.whole)
            _ORIGINS[part] = _Origin(TensorWeakRef(source.whole), self._chosen[key], versions)
        return part


def version_of(tensor: Tensor) -> int:
    """Return torch's counter of in-place writes, or 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version
