"""This rank's part of a model in Megatron-Core.

Use it inside the platform's scope for Megatron-Core, with its layout active.

Fixes for Megatron-Core 0.16.1 without TransformerEngine.

MoE routers call `te_general_gemm`, which exists only with TransformerEngine: `define_missing_names`
defines it. `DistributedOptimizer` cannot load its state: it raises KeyError for `step`, and
`load_state_dict` gives all parameters one `step` tensor, which breaks Adam's bias correction.
`ShardedAdamW` and `checkpoint` avoid both.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn
from transformers import PretrainedConfig

from engines.config.training import OptimizerConfig
from engines.training.backends.megatron.architecture import Architecture
from engines.training.backends.megatron.layout import Layout
from engines.training.backends.megatron.lora import Adapter, add_adapters, start_adapters
from engines.training.backends.megatron.model import PackedModel
from engines.training.backends.megatron.optimizer import ShardedAdamW
from engines.training.backends.megatron.parallel import Place, current_place
from engines.training.backends.megatron.param_mapping import Block, Part, parts_of
from engines.training.backends.megatron.pipeline import Pipeline
from engines.training.backends.megatron.router_replay import RouteMemory
from engines.training.backends.transformers.adapters import base_name
from engines.training.spec import EngineSpec
from infra.errors import ConfigError


def define_missing_names() -> None:
    """Let routers run without TransformerEngine; may be repeated."""
    if not hasattr(moe_utils, "te_general_gemm"):
        cast(Any, moe_utils).te_general_gemm = None


class Replica:
    """The model's pieces on this rank, their optimizer and adapters."""

    def __init__(self, spec: EngineSpec, config: PretrainedConfig, layout: Layout) -> None:
        define_missing_names()
        self._spec, self._layout = spec, layout
        self.place: Place = current_place()
        self.dtype: torch.dtype = getattr(torch, spec.training.dtype)
        self.architecture = Architecture(
            config, layout, self.dtype, recompute=spec.training.gradient_checkpointing
        )
        _seed_without_trace(spec)
        self.chunks = [self._chunk(piece, spec.training.options) for piece in range(layout.virtual)]
        self.parts: list[Part] = parts_of(
            cast(list[nn.Module], self.chunks), self.architecture, layout, self.place
        )
        self._adapters: dict[nn.Parameter, Adapter] = {}
        for part in self.parts:
            parameter = cast(Any, part.parameter)
            # Needed by the gradient norm; Megatron-Core sets it only on weights it initializes.
            parameter.tensor_model_parallel = part.is_cut
            # With tensor parallelism, ranks with the same experts see different tokens.
            parameter.allreduce = not part.is_expert
        if spec.optimizer is not None and spec.training.lora is not None:
            self.parts, self._adapters = add_adapters(
                cast(list[nn.Module], self.chunks),
                self.parts,
                spec.training.lora,
                sequence_parallel=layout.sequence_parallel,
            )
            self.start_adapters()
        self._is_adapted = True
        self._memory: RouteMemory | None = None
        if spec.training.options.get("router_replay") and spec.optimizer is not None:
            self._memory = self._route_memory()
        self.wrapped: list[Any] = list(self.chunks)
        self.optimizer: ShardedAdamW | None = None

    def _chunk(self, piece: int, options: dict[str, Any]) -> PackedModel:
        is_first = self.place.pipeline == 0 and piece == 0
        is_last = (
            self.place.pipeline == self._layout.pipeline - 1 and piece == self._layout.virtual - 1
        )
        chunk = PackedModel(
            self.architecture,
            self._layout,
            self.place,
            self._spec.model_type,
            first=is_first,
            last=is_last,
            piece=piece if self._layout.virtual > 1 else None,
            use_transformer_engine=options.get("transformer_engine", False),
        )
        return chunk.to(self._spec.platform.device())

    def start_adapters(self) -> None:
        """Initialize the adapters, if there are any."""
        start_adapters(self.parts, self._spec.seed)

    def set_adapter(self, enabled: bool) -> None:
        """Enable or disable the adapters in forward passes."""
        self._is_adapted = enabled
        for adapter in self._adapters.values():
            adapter.enabled = enabled

    @torch.no_grad()
    def merged(self, part: Part, block: Block) -> Tensor:
        """Return a block with its adapter merged in, in the parameters' dtype."""
        weight = block.read(part.parameter.detach())
        adapter = self._adapters.get(part.parameter)
        return weight if adapter is None else adapter.merged_into(block, weight).to(self.dtype)

    def freeze(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        """Exclude parameters from training by shell patterns of transformers names.

        Raises:
            ConfigError: a pattern matches nothing, or only a part of a fused matrix.
        """
        for pattern in patterns:
            if not any(fnmatch(base_name(name), pattern) for name in names):
                raise ConfigError("training.frozen_parameters", f"{pattern!r} fits no parameter")
            for part in self.parts:
                fitting = [fnmatch(base_name(block.name), pattern) for block in part.stored]
                if any(fitting) and not all(fitting):
                    raise ConfigError(
                        "training.frozen_parameters",
                        f"{pattern!r} fits some of {', '.join(b.name for b in part.stored)}, "
                        "which are one matrix in Megatron-Core; name all of them",
                    )
                if any(fitting):
                    part.parameter.requires_grad_(False)

    def prepare_training(self, optimizer: OptimizerConfig) -> None:
        """Wrap the loaded pieces for gradient reduction and create the optimizer."""
        config = self.architecture.config
        cast(Any, config).finalize_model_grads_func = _finalize
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self.wrapped = [
            DistributedDataParallel(config, settings, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]
        self.optimizer = ShardedAdamW(self.wrapped, optimizer, self.dtype)

    @torch.no_grad()
    def to(
        self, device: torch.device, *, model: bool, optimizer: bool, grad: bool
    ) -> None:  # fmt: skip
        """Move weights, gradients and optimizer state; offloaded gradients are lost."""
        is_home = device == self._spec.platform.device()
        for chunk in self.wrapped:
            for buffer in _buffers(chunk):
                move = buffer.reload_from_cpu if is_home else buffer.offload_to_cpu
                move(move_params=model, move_grads=grad)
        if model:
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    if not parameter.requires_grad:  # the others are in the buffers
                        parameter.data = parameter.data.to(device)
        if optimizer and self.optimizer is not None:
            self.optimizer.to(device)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs the pieces."""
        # Without its adapter the model is the reference, whose routes are not stored.
        memory = self._memory if self._is_adapted else None
        return Pipeline(self._spec, self._layout, self.place, self.wrapped, memory)

    def _route_memory(self) -> RouteMemory:
        if not self.architecture.is_mixture:
            raise ConfigError(
                "training.options.router_replay",
                f"got true; {self.architecture.hub.model_type} has no experts; set it to false",
            )
        return RouteMemory(cast(list[nn.Module], self.chunks), self._layout, self.place)


def _buffers(chunk: Any) -> list[Any]:
    return [*getattr(chunk, "buffers", []), *chunk.expert_parallel_buffers] if isinstance(
        chunk, DistributedDataParallel
    ) else []  # fmt: skip


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Reduce gradients without division; the loss is already divided."""
    finalize_model_grads(model, None, **options)


def _seed_without_trace(spec: EngineSpec) -> None:
    """Seed the generators that Megatron-Core needs to build layers; restore the RNG state."""
    before = spec.platform.rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(spec.seed, force_reset_rng=True)
    spec.platform.set_rng_state(before)
