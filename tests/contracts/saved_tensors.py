"""What autograd keeps for the backward pass of a forward pass, in bytes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class Kept:
    """Memory that a backward pass holds on to.

    Attributes:
        bytes_by_storage: size of each storage by its address; views of one count once.
    """

    bytes_by_storage: dict[int, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.bytes_by_storage.values())

    def num_of_at_least(self, num_bytes: int) -> int:
        """How many storages are this large or larger."""
        return sum(size >= num_bytes for size in self.bytes_by_storage.values())


@contextmanager
def saved_tensors(but: Iterable[Tensor]) -> Iterator[Kept]:
    """Scope of one forward pass, whose backward pass may be inside or after it.

    Args:
        but: tensors that are there anyway: parameters, inputs.

    Yields:
        Filled while the scope lasts.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in but}
    kept = Kept()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept.bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
