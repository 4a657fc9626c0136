"""What autograd keeps for a backward pass, and the largest that is made on the way, in bytes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


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


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest storage behind any tensor that an operation makes or hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                own = x.to_local() if isinstance(x, DTensor) else x
                self.num_bytes = max(self.num_bytes, own.untyped_storage().nbytes())
        return made
