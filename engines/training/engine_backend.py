"""EngineBackend: what a training backend implements; `base` implements the rest of an engine.

Methods that are not abstract have a default; for adapters, averages and stored weights, an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines import collectives
from engines.errors import EngineError
from engines.training.activation_offload import ActivationOffload
from engines.training.model.image_layout import ImageLayout
from engines.training.spec import EngineSpec, ScaledLoss
from engines.training.step.optimizer_step import Averaged
from engines.types import ModelOutputs, Readouts, TokenBatch
from engines.weight_places import WeightShard, whole_place


@dataclass(frozen=True)
class HeldTensors:
    """What a rank of an engine holds between two passes, as it is held, on any device.

    Attributes:
        modules: those whose forward pass begins a pass of the engine.
        moments: state of the optimizer, with an average of the weights if one is kept.
    """

    modules: Sequence[nn.Module]
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    moments: Sequence[Tensor]


class EngineBackend(ABC):
    """The part of an engine that differs between backends."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @abstractmethod
    def initialize(self, *, load_weights: bool = True) -> None:
        """Build and shard the model and the optimizer.

        Without `load_weights` the weights stay undefined, for `load_checkpoint` to fill.
        """

    @property
    @abstractmethod
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different data; None is the default group or no group."""

    @abstractmethod
    def loss_factor(self, num_micro_batches: int) -> float:
        """Return the factor that turns the backend's mean of gradients into a sum.

        The sum is over data-parallel ranks and micro-batches.
        """

    @abstractmethod
    def _forward(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        """Run one forward pass of a micro-batch on the device."""

    def _begin_micro_batch(self, *, is_last: bool) -> None:  # noqa: B027 (most have nothing to do)
        """Called before each micro-batch of a step.

        Each reduces its gradients to shards; replicas of a shard can all-reduce at the last only.
        """

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Ranks of the stages of a pipeline, in order, or None; only the last has outputs."""
        return None

    def _forward_backward(
        self, batches: Sequence[TokenBatch], scaled_loss: ScaledLoss, readouts: Readouts
    ) -> None:
        """Accumulate gradients of micro-batches on the CPU; calls `scaled_loss` once for each."""
        device = self.spec.platform.device()
        for i, batch in enumerate(batches):
            self._begin_micro_batch(is_last=i == len(batches) - 1)
            on_device = batch.to(device)
            with self._activation_scope():
                loss = scaled_loss(self._forward(on_device, readouts), on_device)
            loss.backward()

    def _infer(self, batches: Sequence[TokenBatch], readouts: Readouts) -> Iterator[ModelOutputs]:
        """Yield the outputs of each micro-batch; nothing on earlier pipeline stages."""
        device = self.spec.platform.device()
        for batch in batches:
            yield self._forward(batch.to(device), readouts)

    def _set_adapter(self, enabled: bool) -> None:
        raise EngineError(f"{self.spec.training.backend} cannot switch its LoRA adapter off")

    def _end_inference(self) -> None:  # noqa: B027 (most backends leave nothing behind)
        """Release gathered weights that forward passes without a backward pass keep."""

    @abstractmethod
    def _clip_gradients(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most `max_norm`; return the norm before."""

    @abstractmethod
    def _apply_optimizer(self, lr: float) -> None:
        """Take one optimizer step."""

    @property
    def _brings_moments(self) -> bool:
        """True if `_apply_optimizer` brings offloaded state to the device itself, in parts."""
        return False

    def _averaged(self) -> Averaged:
        """Return this rank's trained weights and averages, to write in place; needs `ema`."""
        raise EngineError(f"{self.spec.training.backend} keeps no average of its weights")

    def _weights_written(self) -> None:  # noqa: B027 (most backends compute with these tensors)
        """Called after the weights of `_averaged` were written. Collective."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream whole weights under the names that `save_pretrained` would write.

        Collective: every rank exhausts the iterator. Holds one whole tensor at a time; tied weights
        come once.
        """

    def get_frozen_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the base weights below an adapter, like `get_per_tensor_param`.

        Raises:
            EngineError: the backend cannot, or all weights are trained.
        """
        raise EngineError(f"{self.spec.training.backend} streams no adapter")

    def get_adapter_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the whole tensors of the adapter, like `get_per_tensor_param`.

        Names are the module's with `lora_A.weight`, (rank, in), or `lora_B.weight`, (out, rank);
        the adapter adds (alpha / rank) B @ A.

        Raises:
            EngineError: the backend cannot, or all weights are trained.
        """
        raise EngineError(f"{self.spec.training.backend} streams no adapter")

    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        """Stream this rank's shards, named like `get_per_tensor_param`, gathered only if needed.

        Collective: every rank exhausts its iterator. By default rank 0 owns whole weights.
        """
        for name, tensor in self.get_per_tensor_param():
            yield WeightShard(whole_place(name, tensor), tensor, collectives.rank() == 0)

    @abstractmethod
    def to(
        self, device: torch.device | str, *, model: bool = True, optimizer: bool = True,
        grad: bool = True,
    ) -> None:  # fmt: skip
        """Move parts of the engine's state to a device."""

    @abstractmethod
    def save_checkpoint(self, path: Path, step: int) -> None:
        """Write this rank's shard and the step into an empty directory that all ranks share.

        There is no commit protocol.
        """

    def begin_checkpoint(self, path: Path, step: int) -> Callable[[], None]:
        """Copy to the host what `save_checkpoint` would write. Collective.

        Returns a function that writes this rank's files from any thread, without collectives. By
        default saves at once.
        """
        self.save_checkpoint(path, step)
        return lambda: None

    @abstractmethod
    def load_checkpoint(self, path: Path, *, optimizer: bool = True) -> int:
        """Restore a checkpoint of any world size and return its step.

        Without `optimizer`, training starts anew from its weights: the optimizer, the schedule and
        the random generators are not restored. Raises `CheckpointError` if a tensor is absent or
        has another shape.
        """

    @classmethod
    def stored_weights(cls, checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
        """Stream a checkpoint's whole weights by hub name on the CPU, without a process group.

        Raises:
            EngineError: the backend cannot do that.
        """
        raise EngineError(f"{cls.__name__} cannot read its checkpoints without a process group")

    @property
    def _image_layout(self) -> ImageLayout | None:
        """Layout of images that the model needs; None for a model without images."""
        return None

    @property
    def _rotary_limit(self) -> int | None:
        """Longest sequence that does not change others of its micro-batch; None: no limit."""
        return None

    def held_tensors(self) -> HeldTensors:
        """Return this rank's tensors; call it between passes.

        Raises:
            EngineError: the backend cannot tell.
        """
        raise EngineError(f"{self.spec.training.backend} does not tell its tensors: unset "
                          "training.memory_audit")  # fmt: skip

    def _activation_scope(self) -> AbstractContextManager[None]:
        """Scope of a forward pass, with activations on the host if configured."""
        if self._activations is None or not self.spec.training.activation_offload:
            return nullcontext()
        return self._activations.scope()

    @cached_property
    def _activations(self) -> ActivationOffload | None:
        return ActivationOffload.of(self.spec.platform)
