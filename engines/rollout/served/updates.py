"""Weight updates in the process that holds the model; orders and replies travel as JSON.

Promises: every tensor is checked for name, shape and dtype before the engine's library gets it; its
checksum is of the bytes that the library got. Libraries may pack weights for their kernels, so the
model itself has no checksum; `RolloutEngine.score` verifies it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.errors import WeightSyncError
from engines.rollout.served.model_layout import ModelLayout
from engines.weight_sync.base import Receipt, WeightSource
from engines.weight_sync.wire import source_from_json, source_to_json
from infra.errors import PipelineError

NamedTensors = Iterator[tuple[str, Tensor]]

_REFUSALS = (AssertionError, AttributeError, KeyError, RuntimeError, ValueError, OSError)
"""Errors that libraries raise for weights that they cannot load."""


def order_of(source: WeightSource, layout: ModelLayout, dtype: str) -> str:
    """Return the order for `carry_out`."""
    return json.dumps(
        {
            "source": source_to_json(source),
            "shapes": layout.tensors,
            "tied": sorted(layout.tied),
            "float32": sorted(layout.float32),
            "dtype": dtype,
        }
    )


def carry_out(order: str, load: Callable[[NamedTensors], None], worker: int = 0) -> str:
    """Overwrite a model from a weight source in its process, number `worker`; return the reply.

    `load` loads all (name, tensor) pairs into the model.
    """
    parsed = json.loads(order)
    incoming = _Incoming(
        parsed["shapes"],
        set(parsed["tied"]),
        getattr(torch, parsed["dtype"]),
        set(parsed["float32"]),
    )
    try:
        source = source_from_json(parsed["source"]).of_worker(worker)
        load(incoming.check(source.tensors()))
        incoming.check_complete()
    except (PipelineError, *_REFUSALS) as error:
        kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
        return json.dumps({"error": f"{kind}{error}"})
    return json.dumps(
        {
            "digest": combine(incoming.checksums.items()),
            "num_tensors": len(incoming.checksums),
            "num_bytes": incoming.num_bytes,
        }
    )


def agreed(replies: Sequence[str]) -> Receipt:
    """Return the receipt that all processes agree on; an error of one fails the update."""
    receipts: set[Receipt] = set()
    for reply in map(json.loads, replies):
        if "error" in reply:
            raise WeightSyncError(reply["error"])
        receipts.add(Receipt(**reply))
    if len(receipts) != 1:
        raise WeightSyncError(
            f"the engine's processes hold {len(receipts)} different sets of weights"
        )
    return receipts.pop()


class _Incoming:
    """Checks tensors on their way into the model, and records their checksums."""

    def __init__(
        self,
        shapes: Mapping[str, list[int]],
        tied: set[str],
        dtype: torch.dtype,
        float32: set[str],
    ) -> None:
        self._shapes = shapes
        self._tied = tied
        self._dtype = dtype
        self._float32 = float32
        self.checksums: dict[str, str] = {}
        self.num_bytes = 0

    def check(self, tensors: NamedTensors) -> NamedTensors:
        """Pass the tensors on; raise a WeightSyncError at the first unexpected one."""
        for name, tensor in tensors:
            self._check(name, tensor)
            # Cloned: a library keeps tensors until their layer is complete; sources reuse memory.
            own = tensor.clone()
            self.checksums[name] = tensor_checksum(own)
            self.num_bytes += own.numel() * own.element_size()
            yield name, own

    def check_complete(self) -> None:
        """Raise a WeightSyncError if a tensor is missing."""
        missing = sorted(self._shapes.keys() - self.checksums.keys())
        if missing:
            raise WeightSyncError(f"{len(missing)} parameters were not sent, first {missing[0]}")

    def _check(self, name: str, tensor: Tensor) -> None:
        if name in self._tied:
            raise WeightSyncError(f"{name} is tied to another parameter; send the other one only")
        if name not in self._shapes:
            raise WeightSyncError(f"the rollout model has no parameter {name}")
        if name in self.checksums:
            raise WeightSyncError(f"{name} was sent twice")
        if list(tensor.shape) != self._shapes[name]:
            raise WeightSyncError(
                f"{name}: sent shape {tuple(tensor.shape)}, the rollout model has "
                f"{tuple(self._shapes[name])}"
            )
        wanted = torch.float32 if name in self._float32 else self._dtype
        if tensor.dtype != wanted:
            raise WeightSyncError(f"{name}: sent {tensor.dtype}, the rollout dtype is {wanted}")
