"""The Megatron engine: tensor, pipeline, context, expert and data parallelism.

Main weights and gradients are float32; optimizer state is sharded over the ranks that hold the same
weights.

Promises: checkpoints have transformers' names and whole shapes, so any layout and any backend of
the transformers family reads them. Megatron-Core is imported only in the platform's scope for it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from engines import collectives
from engines.architecture import text_settings
from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.engine_state import (
    EngineScalars,
    load_engine_state,
    read_scalars,
    save_engine_state,
    stage_engine_state,
)
from engines.checkpoint.sharded import Region
from engines.errors import EngineError
from engines.training.backends.megatron.layout import Layout, check_layout
from engines.training.backends.transformers.build import check_stored_names
from engines.training.backends.transformers.module_engine import ModuleEngine
from engines.training.base import BaseEngine
from engines.training.engine_backend import HeldTensors
from engines.training.spec import EngineSpec, ScaledLoss
from engines.training.step.optimizer_step import Averaged
from engines.training.supported_models import check_megatron
from engines.training.weight_shards import owned_parts, stream_parts
from engines.types import ModelOutputs, Readouts, TokenBatch
from engines.weight_places import WeightShard
from infra.errors import ConfigError

if TYPE_CHECKING:
    from engines.training.backends.megatron.replica import Replica


class MegatronEngine(BaseEngine):
    """Engine on Megatron-Core."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._layout = Layout.from_config(spec.training)
        self._replica: Replica | None = None
        self._stream: Any = None
        self._staging = StagingBuffers()

    @contextmanager
    def _library(self) -> Iterator[None]:
        """Scope of every call into Megatron-Core."""
        with self.spec.platform.library_scope("megatron"):
            from engines.training.backends.megatron.parallel import activate

            activate(self._layout, self.spec.training.collective_timeout_s)
            yield

    @property
    def replica(self) -> "Replica":
        """This rank's part of the model.

        Raises:
            EngineError: `initialize` was not called.
        """
        if self._replica is None:
            raise EngineError("the engine is not initialized: call initialize() first")
        return self._replica

    def initialize(self, *, load_weights: bool = True) -> None:
        """Build this rank's part of the model and, if it trains, its optimizer."""
        training = self.spec.training
        config = AutoConfig.from_pretrained(self.spec.hf_dir, trust_remote_code=False)
        check_layout(self._layout, config, collectives.world_size())
        if training.lora is not None and training.options.get("transformer_engine"):
            raise ConfigError(
                "training.options.transformer_engine",
                "got true with training.lora; need one of the two: TransformerEngine's matrices "
                "hide the output of the norm before them, which an adapter reads; remove one",
            )
        check_megatron(self.spec.hf_dir, text_settings(config))
        if load_weights:
            check_stored_names(self.spec.hf_dir, self.spec.model_type)
        self._join_ranks()
        try:
            with self._library():
                self._build(config, load_weights=load_weights)
        except ImportError as error:
            raise ConfigError(
                "training.backend",
                f"megatron cannot be imported ({error}); pip install 'rlhf-pipeline[megatron]'",
            ) from error

    def _build(self, config: Any, *, load_weights: bool) -> None:
        with warnings.catch_warnings():
            # Imports warn about absent optional libraries and deprecated names.
            warnings.simplefilter("ignore")
            from engines.training.backends.megatron import param_mapping, replica

        made = replica.Replica(self.spec, config, self._layout)
        if load_weights:
            param_mapping.load_hub_weights(made.parts, self.spec.hf_dir)
        self._stream = param_mapping.WeightStream(made.parts, self.spec.platform.device())
        made.prepare_training()
        self._replica = made

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different sequences."""
        return self.replica.place.data_group

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the stages; None for one stage."""
        return self.replica.place.pipeline_group if self._layout.pipeline > 1 else None

    def loss_factor(self, num_micro_batches: int) -> float:
        """Return 1: Megatron-Core is configured to sum gradients."""
        return 1.0

    def _forward(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        raise EngineError("megatron runs all micro-batches of a step in a schedule of its own")

    def _forward_backward(
        self, batches: Sequence[TokenBatch], scaled_loss: ScaledLoss, readouts: Readouts
    ) -> None:
        with self._library():
            self.replica.run(
                batches, scaled_loss, self._activation_scope, readouts, forward_only=False
            )

    def _infer(self, batches: Sequence[TokenBatch], readouts: Readouts) -> Iterator[ModelOutputs]:
        with self._library():
            outputs = self.replica.infer(batches, self._activation_scope, readouts)
        yield from outputs

    def _set_adapter(self, enabled: bool) -> None:
        self.replica.set_adapter(enabled)

    def _clip_gradients(self, max_norm: float) -> float:
        with self._library():
            return self._optimizer.clip(max_norm)

    def _apply_optimizer(self, lr: float) -> None:
        with self._library():
            self._optimizer.step(lr)

    def _averaged(self) -> Averaged:
        return self._optimizer.averaged

    def _weights_written(self) -> None:
        with self._library():
            self._optimizer.share_weights()

    @property
    def _optimizer(self) -> Any:
        if self.replica.optimizer is None:
            raise EngineError("this engine was made without an optimizer: it cannot train")
        return self.replica.optimizer

    def optimizer_zero_grad(self) -> None:
        """Zero the gradient buffers."""
        with self._library():
            self._optimizer.zero_grad()

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream merged weights in `training.dtype`. Tensors must not be changed."""
        with self.eval_mode():
            yield from self._stream.walk(self.replica.merged, self.replica.dtype)

    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        """Stream this rank's blocks."""
        with self.eval_mode():
            yield from stream_parts(owned_parts(self._stream.held(self.replica.merged)))

    @classmethod
    def stored_weights(cls, checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
        """Stream the whole weights of a checkpoint on the CPU."""
        return ModuleEngine.stored_weights(checkpoint, hf_dir)

    def to(
        self, device: torch.device | str, *, model: bool = True, optimizer: bool = True,
        grad: bool = True,
    ) -> None:  # fmt: skip
        """Move weights, gradients and optimizer state."""
        with self._library():
            self.replica.to(torch.device(device), model=model, optimizer=optimizer, grad=grad)

    def held_tensors(self) -> HeldTensors:
        """Return weights with the main weights of the optimizer, gradient buffers, and moments."""
        return self.replica.held_tensors(self._stored_state)

    def save_checkpoint(self, path: Path, step: int) -> None:
        """Write this rank's shard."""
        with self._stored(step) as state:
            save_engine_state(path, *state, self.spec.platform)

    def begin_checkpoint(self, path: Path, step: int) -> Callable[[], None]:
        """Copy this rank's shard to the host; the returned function writes it."""
        with self._stored(step) as state:
            return stage_engine_state(path, *state, self.spec.platform, self._staging)

    @contextmanager
    def _stored(self, step: int) -> Iterator[tuple[Iterator[Region], EngineScalars]]:
        """Scope on the device, since offloaded weights cannot be read; yields this rank's state."""
        from engines.training.backends.megatron.checkpoint import stored_regions

        with self.eval_mode(), self._library():
            regions = stored_regions(self.replica, self._stored_state)
            yield regions, self._own_scalars(step)

    def load_checkpoint(self, path: Path, *, optimizer: bool = True) -> int:
        """Restore a checkpoint; without the optimizer, merge a stored adapter."""
        from engines.training.backends.megatron.checkpoint import load_moments, load_weights

        loaded = read_scalars(path)
        if optimizer:
            load_engine_state(path, {}, self._own_scalars(0).lora, self.spec.platform)
        with self.eval_mode(), self._library():
            load_weights(path, self.replica, loaded.lora, fold=not optimizer)
            if optimizer:
                self._num_averaged = loaded.num_averaged if self._ema is not None else None
                load_moments(path, self.replica, loaded.num_optimizer_steps, self._stored_state)
        return self._continue_from(loaded, optimizer=optimizer)

    def _own_scalars(self, step: int) -> EngineScalars:
        optimizer = self.replica.optimizer
        return self._scalars(step, optimizer.num_steps if optimizer is not None else 0)
