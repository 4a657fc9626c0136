"""The most that autograd holds for backward passes at one time, in bytes.

Imports torch alone: peers use it in their own environments. Counts what is handed to
`saved_tensors_hooks`, each storage once however many views of it are kept, from when it is saved
until autograd lets go of it. Weights do not count: they are there anyway, as shards or gathered. A
tensor that a function keeps behind autograd's back would not be seen.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


class SavedBytes:
    """What is held now, and the most that was."""

    def __init__(self) -> None:
        self._weights: set[int] = set()
        self._holders: Counter[int] = Counter()
        self.now = 0
        self.peak = 0

    def hold(self, tensor: torch.Tensor) -> "_Held":
        """As autograd's hook for packing wants it."""
        return _Held(self, tensor)

    def leave_out(self, module: torch.nn.Module, *_: object) -> None:
        """The weights of a module that is about to run, by the storages that they have now."""
        for weight in module.parameters(recurse=False):
            self._weights.add(weight.untyped_storage()._cdata)

    def add(self, storage: torch.UntypedStorage) -> None:
        """One more holder of a storage."""
        if storage._cdata in self._weights:
            return
        self._holders[storage._cdata] += 1
        if self._holders[storage._cdata] == 1:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def remove(self, storage: torch.UntypedStorage) -> None:
        """One holder less."""
        if storage._cdata in self._weights:
            return
        self._holders[storage._cdata] -= 1
        if not self._holders[storage._cdata]:
            self.now -= storage.nbytes()


class _Held:
    """A saved tensor; autograd drops it behind the backward pass of its node."""

    def __init__(self, saved: SavedBytes, tensor: torch.Tensor) -> None:
        self._saved, self.tensor = saved, tensor
        saved.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self._saved.remove(self.tensor.untyped_storage())


@contextmanager
def saved_bytes() -> Iterator[SavedBytes]:
    """Scope of whole steps, forward and backward.

    Yields:
        Counts while the scope lasts.
    """
    saved = SavedBytes()
    hook = register_module_forward_pre_hook(saved.leave_out)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.hold, lambda held: held.tensor):
            yield saved
    finally:
        hook.remove()
