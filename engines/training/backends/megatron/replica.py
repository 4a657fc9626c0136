"""This rank's part of a model in Megatron-Core.

Use it inside the platform's scope for Megatron-Core, with its layout active.

Promises: gradients are plain sums over micro-batches and ranks; the last stage computes the loss
once per micro-batch, on outputs of whole rows.

Megatron-Core 0.16.1 needs fixes without TransformerEngine. MoE routers call `te_general_gemm`,
which exists only with TransformerEngine: `define_missing_names` defines it. `DistributedOptimizer`
cannot load its state: it raises KeyError for `step`, and `load_state_dict` gives all parameters one
`step` tensor, which breaks Adam's bias correction. `ShardedAdamW` and `checkpoint` avoid both.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn
from transformers import PretrainedConfig

from engines import collectives
from engines.training.backends.megatron.layout import Layout
from engines.training.backends.megatron.lora import Adapter, add_adapters
from engines.training.backends.megatron.model import Architecture, PackedModel, PackedRow
from engines.training.backends.megatron.optimizer import Shard, ShardedAdamW
from engines.training.backends.megatron.parallel import Place, current_place
from engines.training.backends.megatron.param_mapping import Block, Part, parts_of
from engines.training.backends.megatron.router_replay import RouteMemory, RowRoutes
from engines.training.backends.transformers.adapters import base_name, initialize_adapter
from engines.training.engine_backend import HeldTensors
from engines.training.host_state import HostState
from engines.training.model.attention import Packing, slice_sequence
from engines.training.model.linear_logprobs import targets_of
from engines.training.outputs import read_positions, whole_outputs
from engines.training.spec import EngineSpec, ScaledLoss
from engines.training.step.micro_batches import filler
from engines.types import ModelOutputs, Readouts, TokenBatch
from infra.errors import ConfigError

Scope = Callable[[], AbstractContextManager[None]]


def define_missing_names() -> None:
    """Define the name that MoE routers lack without TransformerEngine; may be repeated."""
    if not hasattr(moe_utils, "te_general_gemm"):
        cast(Any, moe_utils).te_general_gemm = None


class Replica:
    """The model's pieces on this rank, their optimizer and adapters."""

    def __init__(self, spec: EngineSpec, config: PretrainedConfig, layout: Layout) -> None:
        define_missing_names()
        self._spec, self._layout = spec, layout
        self.place: Place = current_place()
        self.dtype: torch.dtype = getattr(torch, spec.training.dtype)
        self._host_state = HostState.of(spec.platform)
        self.architecture = Architecture(
            config, layout, self.dtype, recompute=spec.training.recomputes_layers
        )
        # Megatron-Core needs seeded generators to build layers.
        before = spec.platform.rng_state()
        tensor_parallel.model_parallel_cuda_manual_seed(spec.seed, force_reset_rng=True)
        spec.platform.set_rng_state(before)
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
            if not self.architecture.is_mixture:
                raise ConfigError(
                    "training.options.router_replay",
                    f"got true; {config.model_type} has no experts; set it to false",
                )
            self._memory = RouteMemory(cast(list[nn.Module], self.chunks), layout, self.place)
        self.wrapped: list[Any] = list(self.chunks)
        self.optimizer: ShardedAdamW | None = None

    def _chunk(self, piece: int, options: dict[str, Any]) -> PackedModel:
        stage, layout = self.place.pipeline, self._layout
        return PackedModel(
            self.architecture,
            layout,
            self.place,
            self._spec.model_type,
            first=stage == 0 and piece == 0,
            last=stage == layout.pipeline - 1 and piece == layout.virtual - 1,
            piece=piece if layout.virtual > 1 else None,
            use_transformer_engine=options.get("transformer_engine", False),
        ).to(self._spec.platform.device())

    def shard(self, part: Part) -> Shard | None:
        """Return this rank's shard of a trained parameter, or None."""
        return self.optimizer.shards.get(part.parameter) if self.optimizer is not None else None

    def group_of(self, part: Part) -> dist.ProcessGroup:
        """Return the ranks that hold the same parameter."""
        return self.place.expert_replica_group if part.is_expert else self.place.replica_group

    @torch.no_grad()
    def start_adapters(self) -> None:
        """Initialize adapters from the seed and names; the model's outputs stay the same."""
        for part in self.parts:
            for block in part.stored if ".lora_" in part.name else ():
                whole = torch.empty(block.whole)
                initialize_adapter({block.name: whole}, self._spec.seed)
                block.write(part.parameter, whole[block.slices])

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

    def _freeze(self, patterns: Sequence[str]) -> None:
        """Exclude parameters from training by shell patterns of transformers names."""
        own = [block.name for part in self.parts for block in part.stored]
        lists = collectives.gather_values(own) if patterns else ()
        names = {name for names in lists for name in names}
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

    def prepare_training(self) -> None:
        """Wrap the loaded pieces for gradient reduction and create the optimizer, if it trains.

        Raises:
            ConfigError: a pattern of frozen parameters fits nothing, or a part of a fused matrix.
        """
        if self._spec.optimizer is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
            return
        self._freeze(self._spec.training.frozen_parameters)
        config = self.architecture.config
        cast(Any, config).finalize_model_grads_func = _finalize
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self.wrapped = [
            DistributedDataParallel(config, settings, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]
        self.optimizer = ShardedAdamW(self.wrapped, self._spec.optimizer, self.dtype)

    @torch.no_grad()
    def to(
        self, device: torch.device, *, model: bool, optimizer: bool, grad: bool
    ) -> None:  # fmt: skip
        """Move weights, gradients and optimizer state; offloaded gradients are lost."""
        is_home = device == self._spec.platform.device()
        for buffer in self._buffers():
            move = buffer.reload_from_cpu if is_home else buffer.offload_to_cpu
            move(move_params=model, move_grads=grad)
        if model:
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    if not parameter.requires_grad:  # the others are in the buffers
                        parameter.data = parameter.data.to(device)
        if optimizer and self.optimizer is not None and self._host_state is not None:
            self.optimizer.to(device, self._host_state)

    def held_tensors(self, states: Sequence[str]) -> HeldTensors:
        """Return what this rank holds; `states` names the optimizer's tensors."""
        shards = list(self.optimizer.shards.values()) if self.optimizer is not None else []
        return HeldTensors(
            self.wrapped,
            [*(p for chunk in self.chunks for p in chunk.parameters()), *(s.main for s in shards)],
            [buffer.grad_data for buffer in self._buffers()],
            [shard.state[name] for shard in shards for name in states],
        )

    def _buffers(self) -> list[Any]:
        """Return the buffers of weights and gradients; only pieces that train are wrapped."""
        chunks = self.wrapped if self.optimizer is not None else []
        return [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def infer(
        self, batches: Sequence[TokenBatch], scope: Scope, readouts: Readouts
    ) -> list[ModelOutputs]:
        """Return the outputs of each micro-batch on the last stage; [] on the others."""
        found: list[ModelOutputs] = []

        def keep(outputs: ModelOutputs, batch: TokenBatch) -> Tensor:
            found.append(outputs)
            return outputs.logprobs_T.new_zeros(())

        if self._memory is not None and self._is_adapted:
            self._memory.begin_inference()
        num_fillers = self.run(batches, keep, scope, readouts, forward_only=True)
        return found[num_fillers:]

    def run(
        self,
        batches: Sequence[TokenBatch],
        on_outputs: ScaledLoss,
        scope: Scope,
        readouts: Readouts,
        *,
        forward_only: bool,
    ) -> int:
        """Run the passes of all micro-batches, and reduce gradients unless `forward_only`.

        Calls `on_outputs` on the last stage. Returns the number of fillers, which come first.
        """
        # The interleaved schedule needs a multiple of the number of stages.
        missing = -len(batches) % self._layout.pipeline if self._layout.virtual > 1 else 0
        batches = [filler(batches[0]).batch for _ in range(missing)] + list(batches)
        device = self._spec.platform.device()
        # Without its adapter the model is the reference, whose routes are not stored.
        memory = self._memory if self._is_adapted else None
        for chunk in self.wrapped:
            chunk.train(not forward_only)  # enables recomputation; there is no dropout

        def step(iterator: Iterator[TokenBatch], chunk: nn.Module) -> Any:
            batch = next(iterator).to(device)
            row, read_N = self._row(batch, readouts)
            piece, routes = self.wrapped.index(chunk), RowRoutes()
            if memory is not None:
                if not forward_only:
                    routes = memory.repeated(piece, batch, row.input_ids_S.numel())
                row = replace(row, routes=routes)
            with scope():
                out = chunk(
                    input_ids=row.input_ids_S.unsqueeze(0),
                    position_ids=row.position_ids_S.unsqueeze(0),
                    attention_mask=None,
                    packed_seq_params=row,
                )
            if memory is not None and forward_only:
                memory.record(piece, batch, routes)

            def loss(rows: Tensor) -> Any:
                group = self.place.context_group if self._layout.context > 1 else None
                outputs = whole_outputs(rows, read_N, batch, readouts, self._spec.model_type, group)
                no_tokens = torch.zeros((), dtype=torch.int, device=device)
                return on_outputs(outputs, batch), no_tokens, {}

            return out, loss

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(batches),
            seq_length=1,  # unused: shapes of micro-batches differ and are communicated
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return missing

    def _row(self, batch: TokenBatch, readouts: Readouts) -> tuple[PackedRow, Tensor]:
        """Return this context rank's slice, and the places of the batch that it computes."""
        size = self._layout.context
        part = slice_sequence(
            batch, self.place.context, size, multiple=self._layout.tokens_multiple
        )
        read_N = read_positions(batch, readouts, part)
        return PackedRow(
            part.input_ids_S,
            part.position_ids_S,
            Packing.from_cu_seqlens(
                part.cu_seqlens, self.place.context_group if size > 1 else None
            ),
            read_N - 1 - part.start,
            targets_of(batch, read_N, self._spec.temperature, readouts),
            self._spec.training.chunked_logprobs,
        ), read_N


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Reduce gradients without division; the loss is already divided."""
    finalize_model_grads(model, None, **options)
