"""Counts the tensors that autograd keeps for backward passes, for as long as it keeps them.

A storage counts once however many views of it are kept. What a function keeps without
`save_for_backward` is not seen.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, UntypedStorage
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

_counting: "list[SavedTensors]" = []
"""The counter in use; module-wide, because a recomputed layer cannot be given one."""


class SavedTensors:
    """The bytes kept at the moment, without storages that `is_left_out` names, such as weights."""

    def __init__(
        self, is_left_out: Callable[[UntypedStorage], bool], on_growth: Callable[[], None]
    ) -> None:
        self._is_left_out, self._on_growth = is_left_out, on_growth
        self._num_holders = WeakIdKeyDictionary()
        self.num_bytes = 0

    def __contains__(self, storage: UntypedStorage) -> bool:
        return storage in self._num_holders

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Scope of forward and backward passes."""
        _counting.append(self)
        try:
            with saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor):
                yield
        finally:
            _counting.remove(self)

    def add(self, storage: UntypedStorage) -> None:
        """Count one more holder of a storage."""
        if self._is_left_out(storage):
            return
        num_holders: int = self._num_holders.get(storage) or 0
        self._num_holders[storage] = num_holders + 1
        if not num_holders:
            self.num_bytes += storage.nbytes()
            self._on_growth()

    def remove(self, storage: UntypedStorage) -> None:
        """Count one holder less."""
        num_holders: int = self._num_holders.pop(storage, 0)
        if num_holders > 1:
            self._num_holders[storage] = num_holders - 1
        elif num_holders:
            self.num_bytes -= storage.nbytes()

    def add_until_freed(self, tensor: Tensor) -> None:
        """Count a tensor of a recomputed layer, which torch keeps outside the graph."""
        storage = storage_of(tensor)
        if storage not in self and not self._is_left_out(storage):
            self.add(storage)
            weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class _Kept:
    """A saved tensor; autograd drops it after the backward pass of its operation."""

    def __init__(self, saved: SavedTensors, tensor: Tensor) -> None:
        self._saved, self.tensor = saved, tensor
        saved.add(storage_of(tensor))

    def __del__(self) -> None:
        self._saved.remove(storage_of(self.tensor))


def storage_of(tensor: Tensor) -> UntypedStorage:
    """Return the memory behind a tensor, or behind the local shard of a DTensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def recomputation_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return `context_fn` of `torch.utils.checkpoint`: recomputed layers are counted, too."""
    return nullcontext(), _recomputed(_counting[-1]) if _counting else nullcontext()


@contextmanager
def _recomputed(saved: SavedTensors) -> Iterator[None]:
    # Those of the checkpoint, which take the recomputed tensors; ours only look on.
    pack, unpack = _autograd._top_saved_tensors_default_hooks(False)

    def counted(tensor: Tensor) -> object:
        saved.add_until_freed(tensor)
        return pack(tensor)

    with saved_tensors_hooks(counted, unpack):
        yield
