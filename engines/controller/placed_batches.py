"""Batches in Ray's object store, from which every rank copies its own rows.

A tensor is put once and after writes (inference tensors: at each call); for a selection, its source
is put. A call then carries references and the row spans of each sequence.
Promises: a share is bitwise equal to the result of `worker_group.take`; a rank reads node-local
shared memory and copies only its own rows; an object is freed with its tensor or with the group.
Does not promise to notice writes that bypass torch (see `engines.selection`).
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from engines.images import ImagePatches
from engines.selection import Spans, source_of, spans_of, version_of
from engines.training.step.micro_batches import shortest_unit, untrained
from engines.types import TokenBatch
from infra.errors import DeadlineError

GET_DEADLINE_S = 300.0
"""Deadline to read a tensor that this process has put; a full store first spills others to disk."""

Array = NDArray[np.uint8]
"""(bytes,) of a tensor, row after row; works for dtypes that numpy does not have."""


@dataclass(frozen=True)
class PlacedRows:
    """Rows of a tensor in the object store; `array` is an index into the arrays of the call."""

    array: int
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    spans_B2: Spans

    def copied(self, arrays: Sequence[Array]) -> Tensor:
        """Copy the rows out of the arrays of the call: (N, *row_shape), sequence after sequence."""
        # Memory allocated by torch has the alignment of its other tensors.
        rows = torch.empty((int(np.diff(self.spans_B2).sum()), *self.row_shape), dtype=self.dtype)
        width, source = rows.itemsize * math.prod(self.row_shape), arrays[self.array]
        spans = (self.spans_B2 * width).tolist()
        np.concatenate([source[first:end] for first, end in spans], out=_bytes_of(rows))
        return rows


@dataclass(frozen=True)
class PlacedImages:
    """Images of a share; `places` holds the small index tensors of `ImagePatches` by value."""

    patches: tuple[PlacedRows, ...]
    places: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Share:
    """One part of a batch as it is sent; a filler has `trains=False` and gets a loss mask of 0."""

    input_ids_T: PlacedRows
    columns: Mapping[str, PlacedRows]
    images: PlacedImages | None
    rows: Mapping[str, PlacedRows]
    unit_B: PlacedRows | None
    trains: bool = True

    def select(self, sequences: Sequence[int], *, trains: bool) -> "Share":
        """Return the tokens and rows of some sequences, without their images."""
        chosen: dict[int, Spans] = {}

        def of(placed: PlacedRows) -> PlacedRows:
            # Sharing one object for all tensors of a layout pickles it once.
            own = chosen.setdefault(id(placed.spans_B2), placed.spans_B2[list(sequences)])
            return replace(placed, spans_B2=own)

        return Share(
            of(self.input_ids_T),
            {name: of(column) for name, column in self.columns.items()},
            None,
            {name: of(row) for name, row in self.rows.items()},
            None if self.unit_B is None else of(self.unit_B),
            trains,
        )

    def batch(self, arrays: Sequence[Array]) -> TokenBatch:
        """Build a CPU batch from the arrays of `TensorStore.shares`, in memory of its own."""
        lengths_B = np.diff(self.input_ids_T.spans_B2).flatten()
        images = self.images
        made = TokenBatch(
            self.input_ids_T.copied(arrays),
            torch.from_numpy(np.append(0, lengths_B.cumsum())).to(torch.int32),
            {name: column.copied(arrays) for name, column in self.columns.items()},
            images
            and ImagePatches(tuple(each.copied(arrays) for each in images.patches), *images.places),
            {name: row.copied(arrays) for name, row in self.rows.items()},
            None if self.unit_B is None else self.unit_B.copied(arrays),
        )
        return made if self.trains else untrained(made)


class ObjectStore:
    """Ray's object store of arrays."""

    def put(self, array: Array) -> Any:
        """Copy an array and return a reference; deleting the reference frees the copy."""
        import ray

        return ray.put(array)

    def get(self, reference: Any) -> Array:
        """Return the array in the store's memory, read-only; it stays there while it is in use."""
        import ray
        from ray.exceptions import GetTimeoutError

        try:
            return ray.get(reference, timeout=GET_DEADLINE_S)
        except GetTimeoutError as error:
            raise DeadlineError("a tensor that was put into Ray", GET_DEADLINE_S) from error


@dataclass(frozen=True)
class _Held:
    """An entry of the store; `is_view` means that the tensor's memory is the store's."""

    version: int
    reference: Any
    is_view: bool = False


class TensorStore:
    """The tensors that a group holds in the object store; `num_bytes_put` counts all its puts."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self._store = store or ObjectStore()
        self._held = WeakTensorKeyDictionary()
        self.num_bytes_put = 0

    def shares(
        self, batch: TokenBatch, parts: Sequence[Sequence[int]]
    ) -> list[tuple[Share, list[Any]]]:
        """Return for each part its share and the references of the arrays for `Share.batch`.

        The batch must be on the CPU. A part is a list of sequences in whole units; an empty one
        gets the filler.
        """
        if not batch.input_ids_T.is_cpu:
            raise ValueError(
                f"a batch for ranks is on {batch.input_ids_T.device}; need the CPU; "
                "send batch.to('cpu')"
            )
        refs: list[Any] = []
        tokens_B2 = spans_of(batch.cu_seqlens)
        rows_B2 = spans_of(torch.arange(batch.num_sequences + 1))
        whole = Share(
            self._placed(batch.input_ids_T, tokens_B2, refs),
            {name: self._placed(each, tokens_B2, refs) for name, each in batch.columns.items()},
            None,
            {name: self._placed(each, rows_B2, refs) for name, each in batch.rows.items()},
            None if batch.unit_B is None else self._placed(batch.unit_B, rows_B2, refs),
        )
        found: list[tuple[Share, list[Any]]] = []
        for part in parts:
            own, sequences = list(refs), part or shortest_unit(batch)
            share = whole.select(sequences, trains=bool(part))
            images = batch.images and batch.images.select(sequences)
            if images is not None:
                placed = PlacedImages(
                    tuple(self._placed(x, np.array([[0, len(x)]]), own) for x in images.patches),
                    (images.grid_thw_U3, images.image_index_I, images.num_images_B),
                )
                share = replace(share, images=placed)
            found.append((share, own))
        return found

    def placed(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with ids and columns read from the store (read-only).

        A tensor whose source is still alive stays as it is, because ranks read the source.
        """
        tokens_B2 = spans_of(batch.cu_seqlens)

        columns = {name: self._view(each, tokens_B2) for name, each in batch.columns.items()}
        return replace(batch, input_ids_T=self._view(batch.input_ids_T, tokens_B2), columns=columns)

    def clear(self) -> None:
        """Drop the references, which frees the objects."""
        self._held.clear()

    def _placed(self, tensor: Tensor, spans_B2: Spans, refs: list[Any]) -> PlacedRows:
        """Put a tensor, append its reference to `refs` and return its rows."""
        source = source_of(tensor, spans_B2)
        refs.append(self._put(source.whole).reference)
        return PlacedRows(len(refs) - 1, tensor.dtype, tuple(tensor.shape[1:]), source.spans_B2)

    def _view(self, tensor: Tensor, spans_B2: Spans) -> Tensor:
        """Return a tensor of equal values in the store's memory, or itself; see `placed`."""
        if source_of(tensor, spans_B2).whole is not tensor:
            return tensor
        held = self._put(tensor)
        if held.is_view:
            return tensor
        with warnings.catch_warnings():
            # Torch has no read-only tensors and warns once.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            stored = torch.from_numpy(self._store.get(held.reference))
        view = stored.view(tensor.dtype).reshape(tensor.shape)
        self._held[view] = _Held(version_of(view), held.reference, is_view=True)
        return view

    def _put(self, tensor: Tensor) -> _Held:
        held: _Held | None = self._held.get(tensor)
        if held is None or held.version != version_of(tensor):
            held = _Held(version_of(tensor), self._store.put(_bytes_of(tensor)))
            if not tensor.is_inference():  # its version does not count writes
                self._held[tensor] = held
            self.num_bytes_put += tensor.nbytes
        return held


def _bytes_of(tensor: Tensor) -> Array:
    """Return the bytes row after row; shares memory with a contiguous tensor."""
    dense = tensor.detach().contiguous()
    # Torch calls one element with any stride contiguous, but the view as bytes needs stride 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
