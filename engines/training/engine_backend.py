"""What a training backend brings to an engine.

That is: build and shard the model, one forward pass, clip and step, stream the weights, its state.
Everything else of an engine is in `base`, once. Abstract members are what every backend needs;
the others have a default that fits a backend without pipelines, adapters or its own formats.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.errors import EngineError
from engines.training.model.activation_offload import activations_on_host
from engines.training.model.image_layout import ImageLayout
from engines.training.spec import EngineSpec, ScaledLoss
from engines.training.step.average import Averaged
from engines.types import ModelOutputs, Readouts, TokenBatch
from engines.weight_places import WeightShard, whole_place


class EngineBackend(ABC):
    """The part of an engine that differs from backend to backend.

    Args:
        spec: what to make it from.

    Attributes:
        spec: what it was made from.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @abstractmethod
    def initialize(self, *, load_weights: bool = True) -> None:
        """Build and shard the model and the optimizer.

        Args:
            load_weights: False leaves the weights undefined, for `load_checkpoint` to fill.
        """

    @property
    @abstractmethod
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different data; None is the default group, or no group at all."""

    @abstractmethod
    def loss_factor(self, num_micro_batches: int) -> float:
        """What the loss is multiplied with so that the backend's gradients become a plain sum.

        The sum is over data-parallel ranks and micro-batches; backends average some of it.
        """

    @abstractmethod
    def _forward(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        """One forward pass of a micro-batch that lies on the device."""

    def _begin_micro_batch(self, *, is_last: bool) -> None:  # noqa: B027 (most have nothing to do)
        """Called before each micro-batch of a step.

        Gradients that are reduced to shards are reduced by every micro-batch, so that no rank holds
        them whole in between; what copies of the shards exchange can wait for the last.
        """

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the stages of one pipeline, in order; None when there is one stage.

        Only the last stage sees outputs and losses; the base hands the results to the others.
        """
        return None

    def _forward_backward(
        self, batches: Sequence[TokenBatch], scaled_loss: ScaledLoss, readouts: Readouts
    ) -> None:
        """Accumulate the gradients of all micro-batches; a pipeline brings its own schedule.

        Args:
            batches: micro-batches, on the CPU.
            scaled_loss: to be called once on the outputs of each.
            readouts: what outputs need.
        """
        device = self.spec.platform.device()
        for i, batch in enumerate(batches):
            self._begin_micro_batch(is_last=i == len(batches) - 1)
            on_device = batch.to(device)
            with self._activation_scope():
                loss = scaled_loss(self._forward(on_device, readouts), on_device)
            loss.backward()

    def _infer(self, batches: Sequence[TokenBatch], readouts: Readouts) -> Iterator[ModelOutputs]:
        """Outputs of each micro-batch, without gradient; nothing on earlier pipeline stages."""
        device = self.spec.platform.device()
        for batch in batches:
            yield self._forward(batch.to(device), readouts)

    def _set_adapter(self, enabled: bool) -> None:
        """Whether forward passes go through the adapter."""
        raise EngineError(f"{self.spec.training.backend} has no adapter")

    def _end_inference(self) -> None:  # noqa: B027 (most backends leave nothing behind)
        """Give back what forward passes without a backward pass left behind."""

    @abstractmethod
    def _clip_gradients(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before."""

    @abstractmethod
    def _apply_optimizer(self, lr: float) -> None:
        """One optimizer step at this learning rate."""

    def _averaged(self) -> Averaged:
        """This rank's trained weights, to be read and written in place, with their average.

        Of an engine whose optimizer has `ema`, made with the average equal to the first weights. A
        backend that keeps none is refused when its engine is made.
        """
        raise EngineError(f"{self.spec.training.backend} keeps no average of its weights")

    def _weights_written(self) -> None:  # noqa: B027 (most backends compute with these tensors)
        """Called after weights of `_averaged` were written. Collective."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights by the names that `save_pretrained` would write, each whole.

        Collective: every rank walks the iterator to its end. Holds one whole tensor at a time;
        tied weights come once.
        """

    def get_frozen_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights that an adapter stands on, as `get_per_tensor_param` their sums.

        Returns:
            Name and whole tensor of each.

        Raises:
            EngineError: the backend cannot, or all weights are trained.
        """
        raise EngineError(f"{self.spec.training.backend} streams no adapter")

    def get_adapter_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the adapter, each tensor whole; as `get_per_tensor_param`.

        The two of a module are called as it is, with `lora_A.weight`, (rank, in), and
        `lora_B.weight`, (out, rank). Scaled by alpha / rank, B @ A is what is added.

        Returns:
            Name and whole tensor of each.

        Raises:
            EngineError: as `get_frozen_param`.
        """
        raise EngineError(f"{self.spec.training.backend} streams no adapter")

    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        """Stream the parts of the weights that this rank holds, without gathering any weight.

        Names, values and dtypes are those of `get_per_tensor_param`. Collective: every rank walks
        its iterator to the end. A backend that cannot yields whole weights, owned by rank 0.
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
        """Write this rank's shard into an existing directory, without any commit protocol.

        Args:
            path: shared by all ranks; empty.
            step: recorded, and returned by `load_checkpoint`.
        """

    def begin_checkpoint(self, path: Path, step: int) -> Callable[[], None]:
        """Copy to the host what `save_checkpoint` would write. Collective.

        A backend that cannot saves at once.

        Args:
            path: shared by all ranks; empty.
            step: recorded, and returned by `load_checkpoint`.

        Returns:
            Writes this rank's files from any thread, without a collective, while training goes on.
        """
        self.save_checkpoint(path, step)
        return lambda: None

    @abstractmethod
    def load_checkpoint(self, path: Path, *, optimizer: bool = True) -> int:
        """Restore a checkpoint of any world size.

        Args:
            path: what `save_checkpoint` wrote.
            optimizer: also restore the optimizer, the schedule and the random generators; without
                it the engine starts anew from these weights.

        Returns:
            The step it was saved at.

        Raises:
            CheckpointError: a tensor is absent or has another shape.
        """

    @classmethod
    def stored_weights(cls, checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights of a checkpoint as `get_per_tensor_param` would, on the CPU.

        Needs no process group and makes no engine.

        Args:
            checkpoint: what `save_checkpoint` wrote.
            hf_dir: configuration of the model.

        Returns:
            Whole tensors by hub name, in the order of the architecture.

        Raises:
            EngineError: the backend cannot do that.
        """
        raise EngineError(f"{cls.__name__} cannot read its checkpoints without a process group")

    @property
    def _image_layout(self) -> ImageLayout | None:
        """How the model wants images; None is a model that sees none."""
        return None

    @property
    def _rotary_limit(self) -> int | None:
        """Longest sequence whose length does not change the others' outputs; None is any."""
        return None

    def _activation_scope(self) -> AbstractContextManager[None]:
        """Scope of a forward pass whose activations are kept as the configuration says."""
        if self.spec.training.activation_offload:
            return activations_on_host(self.spec.platform.device())
        return nullcontext()
