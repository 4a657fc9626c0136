"""The tensors of a batch in Ray's object store, from which every rank copies its own rows.

A tensor is put once while it lives, however many calls name it: as itself, or as what the batch
was selected from. A call then carries references and the rows of each sequence.
Promises: a share is bitwise what `dispatch.take` gives; a rank reads memory that the processes of
its node share, and copies its own rows alone; an object goes with its tensor, or with the group.
Does not promise: to notice writes past torch (see `engines.selection`); that each row of what a
batch was selected from is read. Small tensors go the same way: a put costs less than
a millisecond, once, and a second path would have to be held equal to this one.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
"""Of a tensor that this process has put; a store that is full writes others to disk first."""

Array = NDArray[np.uint8]
"""(bytes,) of a tensor, its rows end to end: any dtype, whether numpy knows it or not."""


@dataclass(frozen=True)
class PlacedRows:
    """Rows of a tensor in the object store.

    Attributes:
        array: place of its bytes among the arrays of the call.
        dtype: of the tensor.
        row_shape: of one row.
        spans_B2: rows of each sequence.
    """

    array: int
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    spans_B2: Spans

    def copied(self, arrays: Sequence[Array]) -> Tensor:
        """The rows, in memory of their own.

        Args:
            arrays: of the call.

        Returns:
            (N, *row_shape), one sequence behind the other.
        """
        # Torch's memory, not numpy's: it is aligned as that of every other tensor.
        rows = torch.empty((int(np.diff(self.spans_B2).sum()), *self.row_shape), dtype=self.dtype)
        width, source = rows.itemsize * math.prod(self.row_shape), arrays[self.array]
        spans = (self.spans_B2 * width).tolist()
        np.concatenate([source[first:end] for first, end in spans], out=_bytes_of(rows))
        return rows


@dataclass(frozen=True)
class PlacedImages:
    """Images of a share, as `ImagePatches`.

    Attributes:
        patches: of each image.
        places: `grid_thw_U3`, `image_index_I` and `num_images_B`: small, so by value.
    """

    patches: tuple[PlacedRows, ...]
    places: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Share:
    """One part of a batch, as it is sent: a `TokenBatch` whose tensors lie in the object store.

    Attributes:
        input_ids_T: as of the batch.
        columns: likewise.
        images: likewise.
        rows: likewise.
        unit_B: likewise.
        trains: False for a filler, whose loss mask is 0.
    """

    input_ids_T: PlacedRows
    columns: Mapping[str, PlacedRows]
    images: PlacedImages | None
    rows: Mapping[str, PlacedRows]
    unit_B: PlacedRows | None
    trains: bool = True

    def select(self, sequences: Sequence[int], *, trains: bool) -> "Share":
        """The tokens and rows of some sequences, without their images."""
        chosen: dict[int, Spans] = {}

        def of(placed: PlacedRows) -> PlacedRows:
            # One object for all tensors of a layout is pickled once.
            key = id(placed.spans_B2)
            if key not in chosen:
                chosen[key] = placed.spans_B2[list(sequences)]
            return replace(placed, spans_B2=chosen[key])

        return Share(
            of(self.input_ids_T),
            {name: of(column) for name, column in self.columns.items()},
            None,
            {name: of(row) for name, row in self.rows.items()},
            None if self.unit_B is None else of(self.unit_B),
            trains,
        )

    def batch(self, arrays: Sequence[Array]) -> TokenBatch:
        """The share as a batch of its own.

        Args:
            arrays: that were put, in the order in which `TensorStore.shares` names them.

        Returns:
            On the CPU; no memory is shared with the arrays.
        """
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


class ObjectStore(Protocol):
    """Where arrays are put."""

    def put(self, array: Array) -> Any:
        """Copy an array; returns a reference. The copy is freed when the reference is deleted."""
        ...

    def get(self, reference: Any) -> Array:
        """The copy itself, read-only; it lives as long as what is returned."""
        ...


class RayObjectStore:
    """That of Ray."""

    def put(self, array: Array) -> Any:
        """See `ObjectStore`."""
        import ray

        return ray.put(array)

    def get(self, reference: Any) -> Array:
        """See `ObjectStore`."""
        import ray
        from ray.exceptions import GetTimeoutError

        try:
            return ray.get(reference, timeout=GET_DEADLINE_S)
        except GetTimeoutError as error:
            raise DeadlineError("a tensor that was put into Ray", GET_DEADLINE_S) from error


@dataclass(frozen=True)
class _Held:
    """What is known of a tensor.

    Attributes:
        version: at which it was put.
        reference: of its bytes.
        is_view: its memory is that of the store.
    """

    version: int
    reference: Any
    is_view: bool = False


class TensorStore:
    """What a group holds in the object store, by tensor.

    Args:
        store: holds the bytes.

    Attributes:
        num_bytes_put: so far.
    """

    def __init__(self, store: ObjectStore | None = None) -> None:
        self._store = store or RayObjectStore()
        self._held = WeakTensorKeyDictionary()
        self.num_bytes_put = 0

    def shares(
        self, batch: TokenBatch, parts: Sequence[Sequence[int]]
    ) -> list[tuple[Share, list[Any]]]:
        """What is sent of a batch to each part.

        Args:
            batch: on the CPU.
            parts: sequences of each, whole units; one without any gets the filler.

        Returns:
            For each part its share, and references to the arrays of which `Share.batch` makes it.

        Raises:
            ValueError: the batch is not on the CPU.
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
            shown = batch.images and batch.images.select(sequences)
            images = shown and self._images(shown, own)
            share = whole.select(sequences, trains=bool(part))
            found.append((replace(share, images=images), own))
        return found

    def placed(self, batch: TokenBatch) -> TokenBatch:
        """The same batch, its ids and columns read from the store.

        What was selected from a tensor that lives stays as it is: ranks read that tensor.

        Args:
            batch: on the CPU.

        Returns:
            Its ids and columns are read-only.

        Raises:
            DeadlineError: the store does not answer.
        """
        tokens_B2 = spans_of(batch.cu_seqlens)

        def of(tensor: Tensor) -> Tensor:
            return (
                tensor if source_of(tensor, tokens_B2).whole is not tensor else self._view(tensor)
            )

        columns = {name: of(column) for name, column in batch.columns.items()}
        return replace(batch, input_ids_T=of(batch.input_ids_T), columns=columns)

    def clear(self) -> None:
        """Free everything."""
        self._held.clear()

    def _images(self, images: ImagePatches, refs: list[Any]) -> PlacedImages:
        patches = tuple(
            self._placed(each, np.array([[0, len(each)]]), refs) for each in images.patches
        )
        return PlacedImages(
            patches, (images.grid_thw_U3, images.image_index_I, images.num_images_B)
        )

    def _placed(self, tensor: Tensor, spans_B2: Spans, refs: list[Any]) -> PlacedRows:
        """A tensor's rows of all sequences; adds the reference to `refs`."""
        source = source_of(tensor, spans_B2)
        refs.append(self._put(source.whole).reference)
        return PlacedRows(len(refs) - 1, tensor.dtype, tuple(tensor.shape[1:]), source.spans_B2)

    def _view(self, tensor: Tensor) -> Tensor:
        """A tensor of equal values whose memory is the store's."""
        held = self._put(tensor)
        if held.is_view:
            return tensor
        array = self._store.get(held.reference)
        with warnings.catch_warnings():
            # Torch knows no read-only tensors, and says so once.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            view = torch.from_numpy(array).view(tensor.dtype).reshape(tensor.shape)
        self._held[view] = _Held(version_of(view), held.reference, is_view=True)
        return view

    def _put(self, tensor: Tensor) -> _Held:
        held: _Held | None = self._held.get(tensor)
        if held is None or held.version != version_of(tensor):
            held = _Held(version_of(tensor), self._store.put(_bytes_of(tensor)))
            if not tensor.is_inference():  # no write to it would show
                self._held[tensor] = held
            self.num_bytes_put += tensor.nbytes
        return held


def _bytes_of(tensor: Tensor) -> Array:
    """Its bytes, rows end to end; shares memory with a contiguous tensor."""
    dense = tensor.detach().contiguous()
    # Torch takes any stride of a single number for contiguous, but not for bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
