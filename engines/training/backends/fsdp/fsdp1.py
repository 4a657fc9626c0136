"""The FSDP engine: torch's first fully sharded data parallel, for recipes that name it.

Promises: the results of fsdp2, and checkpoints that load in either. Every micro-batch reduces and
accumulates gradients in float32; `no_sync` would accumulate unsharded ones in the compute dtype.
Unlike fsdp2, each rank builds the whole model before sharding, and saving a checkpoint gathers the
weights. A single process in float32 runs the plain module.
Not covered: shards in host memory, where torch does not accumulate gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import PreTrainedModel

from engines.checkpoint.hub_names import named_state
from engines.training.backends.fsdp.engine import sharding_mesh
from engines.training.backends.options import FSDPOptions
from engines.training.backends.transformers.build import build_model, decoder_layers
from engines.training.backends.transformers.engine import TransformersModelEngine
from engines.training.backends.transformers.module_engine import decayed_names
from engines.training.spec import EngineSpec

_WRAPPER = "_fsdp_wrapped_module."
_STRATEGIES = {
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
    (False, True): ShardingStrategy.FULL_SHARD,
    (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    (True, True): ShardingStrategy.HYBRID_SHARD,
}
"""(hybrid sharding, gathered weights are freed after the forward pass) -> torch's name for it."""


class FSDPEngine(TransformersModelEngine):
    """Engine on torch's `FullyShardedDataParallel`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._state_names: list[str] = []
        self._decayed: set[str] = set()

    @property
    def _wrapped(self) -> FullyShardedDataParallel | None:
        model = cast(Any, self.model)
        return model if isinstance(model, FullyShardedDataParallel) else None

    def _build_model(self, *, load_weights: bool) -> PreTrainedModel:
        # The wrapper flattens the parameters of a unit into one tensor of one dtype.
        model = build_model(self.spec, None, load_weights=load_weights, mixes_dtypes=False)
        self._state_names = [name for name, _ in named_state(model)]
        # Before wrapping, which flattens every parameter.
        self._decayed = decayed_names(model)
        if not self._is_sharded():
            return model
        options = FSDPOptions.model_validate(self.spec.training.options)
        training, platform = self.spec.training, self.spec.platform
        wrapped = FullyShardedDataParallel(
            model,
            device_mesh=sharding_mesh(
                platform.device_name, training.replicate_size, training.collective_timeout_s
            ),
            sharding_strategy=_STRATEGIES[
                training.replicate_size > 1, options.reshard_after_forward
            ],
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in decoder_layers(model)}),
            mixed_precision=MixedPrecision(
                param_dtype=getattr(torch, training.dtype), reduce_dtype=torch.float32
            ),
            device_id=platform.device(),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=options.forward_prefetch,
            use_orig_params=True,
        )
        FullyShardedDataParallel.set_state_dict_type(
            wrapped,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(_use_dtensor=True),
            ShardedOptimStateDictConfig(_use_dtensor=True),
        )
        # The wrapper forwards the attributes of the module.
        return cast(PreTrainedModel, wrapped)

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield name.replace(_WRAPPER, ""), parameter

    def _decayed_names(self) -> set[str]:
        return self._decayed

    def _clip_gradients(self, max_norm: float) -> float:
        if self._wrapped is None:
            return super()._clip_gradients(max_norm)
        return float(self._wrapped.clip_grad_norm_(max_norm))

    def _end_inference(self) -> None:
        # Without a backward pass, gathered weights stay: the root's, or those of every layer
        # without `reshard_after_forward`.
        for unit in _units(self._wrapped):
            if unit._handle.uses_sharded_strategy:
                _reshard(unit, unit._handle, free_unsharded_flat_param=True)

    @contextmanager
    def _state_scope(self) -> Iterator[None]:
        if self._wrapped is None:
            with super()._state_scope():
                yield
        else:  # the wrapper gathers weights and optimizer states on the device
            with self.train_mode(), self._optimizer_scope():
                yield

    def _named_state(self) -> list[tuple[str, Tensor]]:
        if self._wrapped is None:
            return super()._named_state()
        state = self._wrapped.state_dict()
        return [(name, state[name]) for name in self._state_names]

    def _optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        if self._wrapped is None or self._optimizer is None:
            return super()._optimizer_states()
        state = FullyShardedDataParallel.optim_state_dict(self._wrapped, self._optimizer)
        return cast(dict[str, dict[str, Tensor]], state["state"])

    @contextmanager
    def _loading(self) -> Iterator[tuple[list[tuple[str, Tensor]], dict[str, dict[str, Tensor]]]]:
        """Yield sharded copies to fill, and write them back."""
        if self._wrapped is None:
            with super()._loading() as live:
                yield live
            return
        model, optimizer = self._named_state(), self._optimizer_states()
        yield model, optimizer
        # Not strict: tied weights are one entry here.
        self._wrapped.load_state_dict(dict(model), strict=False)
        if self._optimizer is not None and optimizer:
            groups = FullyShardedDataParallel.optim_state_dict(self._wrapped, self._optimizer)
            filled = {"state": optimizer, "param_groups": groups["param_groups"]}
            self._optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(
                    self._wrapped, self._optimizer, filled
                )
            )

    def to(
        self, device: torch.device | str, *, model: bool = True, optimizer: bool = True,
        grad: bool = True,
    ) -> None:  # fmt: skip
        """Move the flat parameters with their gradients, and optimizer state."""
        wrapped = self._wrapped
        if wrapped is None:
            super().to(device, model=model, optimizer=optimizer, grad=grad)
            return
        if model and not grad:
            self.optimizer_zero_grad()
        if model:
            for unit in _units(wrapped):
                unit._handle.flat_param_to(torch.device(device), non_blocking=False)
                unit._handle.flat_param._local_shard = unit._handle.flat_param.data
        if optimizer:
            super().to(device, model=False, optimizer=True, grad=False)


def _units(wrapped: FullyShardedDataParallel | None) -> list[Any]:
    """Return the wrapped modules that have parameters of their own."""
    units = FullyShardedDataParallel.fsdp_modules(wrapped) if wrapped is not None else []
    return [unit for unit in units if unit._handle is not None]
