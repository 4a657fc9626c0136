"""What vLLM's workers can do beside vLLM: read a weight source in their own process.

Promises: every tensor is checked for name, shape and dtype before vLLM sees it, and its checksum
is of the bytes that vLLM was given; vLLM's own list of what it loaded must be complete; after an
error the model can take the next update. Errors travel as text, since vLLM would make a bare
`Exception` of them.
Does not promise a checksum of the weights as they lie in the worker: on a CPU vLLM packs linear
layers and frees the originals. Whoever wants to know asks for logprobs (`RolloutEngine.score`).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.errors import WeightSyncError
from engines.weight_sync.wire import source_from_json
from infra.errors import PipelineError
from infra.faults import fault

_VLLM_REFUSALS = (AssertionError, AttributeError, KeyError, RuntimeError, ValueError, OSError)


class WorkerExtension:
    """Mixed into vLLM's worker class, whose attributes it uses."""

    get_model: Any
    model_config: Any
    vllm_config: Any

    def receive_weights(self, order: str) -> str:
        """Overwrite every parameter from a weight source.

        Args:
            order: JSON with `source` (see `engines.weight_sync.wire`), `shapes` (of every tensor,
                by name), `tied` (names that are not sent) and `dtype`.

        Returns:
            JSON with the fields of a `Receipt`, or `error`.
        """
        parsed = json.loads(order)
        incoming = _Incoming(parsed["shapes"], set(parsed["tied"]), getattr(torch, parsed["dtype"]))
        from vllm.config import set_current_vllm_config

        try:
            tensors = incoming.check(source_from_json(parsed["source"]).tensors())
            with set_current_vllm_config(self.vllm_config):
                _reload(self.get_model(), self.model_config, tensors)
            incoming.check_complete()
        except (PipelineError, *_VLLM_REFUSALS) as error:
            kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
            return json.dumps({"error": f"{kind}{error}"})
        return json.dumps(
            {
                "digest": combine(incoming.checksums.items()),
                "num_tensors": len(incoming.checksums),
                "num_bytes": incoming.num_bytes,
            }
        )


class _Incoming:
    """Checks tensors on their way into the model, and remembers what passed."""

    def __init__(self, shapes: Mapping[str, list[int]], tied: set[str], dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._tied = tied
        self._dtype = dtype
        self.checksums: dict[str, str] = {}
        self.num_bytes = 0

    def check(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on; raises a WeightSyncError at the first that is not expected."""
        for name, tensor in tensors:
            self._check(name, tensor)
            # vLLM keeps it until the rest of its layer has come; its own memory may be reused.
            own = tensor.clone()
            self.checksums[name] = tensor_checksum(own)
            self.num_bytes += own.numel() * own.element_size()
            yield name, own

    def check_complete(self) -> None:
        """Raise a WeightSyncError unless everything has passed."""
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
        if tensor.dtype != self._dtype:
            raise WeightSyncError(
                f"{name}: sent {tensor.dtype}, the rollout dtype is {self._dtype}"
            )


def _reload(model: Any, model_config: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Load a whole checkpoint into a model that was processed for its kernels.

    `model.load_weights` alone does not do: what it would write into is gone on a CPU.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    wanted = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(tensors)
    finally:
        # After an error too: else the next update would add to what this one left behind.
        finalize_layerwise_reload(model, model_config)
    missing = sorted(wanted - (wanted if loaded is None else loaded))
    if missing:
        raise WeightSyncError(f"vLLM got no weights for {', '.join(missing[:3])}")
    if not fault("vllm.head_refresh"):
        _refresh_packed_heads(model)


def _refresh_packed_heads(model: Any) -> None:
    """Pack the output heads anew, on a CPU.

    vLLM 0.32 forgets to: a head that is tied to the embedding goes on computing with the packed
    copy of the old weights, without a word.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
