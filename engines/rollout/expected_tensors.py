"""Checks the tensors of a weight update before they reach a rollout model; computes digests.

Promises: every tensor comes once, under a known name, with the shape and dtype in which it is held.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from engines.checksum import ChecksumMethod, TensorChecksums
from engines.errors import WeightSyncError
from engines.weight_sync.base import WeightDigest


class ExpectedTensors:
    """Checks one update's tensors against `wanted` (shape, dtype); `tied` are not sent."""

    def __init__(
        self,
        wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        tied: Collection[str],
    ) -> None:
        self._wanted, self._tied = wanted, tied
        self._seen: set[str] = set()

    def check(self, name: str, tensor: Tensor) -> None:
        """Record a tensor as received; raise WeightSyncError if it is not expected."""
        if name in self._tied:
            raise WeightSyncError(f"{name} is tied to another parameter; send the other one only")
        if name not in self._wanted:
            raise WeightSyncError(f"the rollout model has no parameter {name}")
        if name in self._seen:
            raise WeightSyncError(f"{name} was sent twice")
        shape, dtype = self._wanted[name]
        if tuple(tensor.shape) != shape:
            raise WeightSyncError(
                f"{name}: sent shape {tuple(tensor.shape)}, the rollout model has {shape}"
            )
        if tensor.dtype != dtype:
            raise WeightSyncError(f"{name}: sent {tensor.dtype}, its rollout dtype is {dtype}")
        self._seen.add(name)

    def check_complete(self) -> None:
        """Raise a WeightSyncError if a tensor is missing."""
        if missing := sorted(self._wanted.keys() - self._seen):
            raise WeightSyncError(f"{len(missing)} parameters were not sent, first {missing[0]}")


def digest_of(tensors: Mapping[str, Tensor], method: ChecksumMethod) -> WeightDigest:
    """Return the digest of a mapping from names to tensors."""
    checksums = TensorChecksums(method)
    for name, tensor in tensors.items():
        checksums.add(name, tensor)
    return WeightDigest.of(checksums)


def tied_names(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that are the same tensor as an earlier one."""
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return frozenset(names) - dict(model.named_parameters()).keys()
