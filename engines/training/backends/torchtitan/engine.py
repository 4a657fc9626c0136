"""The TorchTitan engine: TorchTitan's decoder, its FSDP2 and its tensor parallelism.

Promises: tensors have the names of the Hugging Face model, so checkpoints are interchangeable with
those of fsdp2; logits are never gathered over tensor-parallel ranks.
Not covered: pipeline, context and expert parallelism, value models and adapters.
Training needs the job environment torchtitan; reading a checkpoint's weights does not.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from engines import collectives
from engines.collectives import whole_tensor
from engines.errors import EngineError
from engines.training.backends.options import TorchTitanOptions
from engines.training.backends.transformers.build import check_stored_names, load_hub_weights
from engines.training.backends.transformers.module_engine import DATA, ModuleEngine, make_adamw
from engines.training.model.attention import Packing
from engines.training.model.linear_logprobs import Targets, head_rows, targets_of
from engines.training.model.linear_tiles import tile_elements
from engines.training.outputs import read_positions, whole_outputs
from engines.training.spec import EngineSpec
from engines.training.step.optimizer_step import clip_across_meshes
from engines.training.weight_shards import HeldPart, owned_parts, stream_parts
from engines.types import ModelOutputs, Readouts, TokenBatch
from engines.weight_places import WeightShard, local_place, local_values
from infra.errors import ConfigError


class TorchTitanEngine(ModuleEngine[Any]):
    """Engine on TorchTitan."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._hub_names: list[str] = []
        self._wanted: tuple[Tensor, Targets] | None = None

    def initialize(self, *, load_weights: bool = True) -> None:
        """Build and shard the decoder and, if it trains, its optimizer."""
        training, platform = self.spec.training, self.spec.platform
        if training.frozen_parameters:
            raise ConfigError(
                "training.frozen_parameters", "torchtitan trains all parameters; remove them"
            )
        self._join_ranks()
        tensor = training.tensor_parallel_size
        self._mesh = collectives.make_mesh(
            platform.device_name,
            (dist.get_world_size() // tensor, tensor),
            (DATA, "tensor"),
            training.collective_timeout_s,
        )
        try:
            with platform.library_scope("torchtitan"):
                from engines.training.backends.torchtitan.model import sharded_decoder

                self._model, self._hub_names = sharded_decoder(
                    self.spec,
                    TorchTitanOptions.model_validate(training.options).fsdp_reshard_after_forward,
                )
        except ImportError as error:
            raise ConfigError(
                "training.backend", f"torchtitan cannot be imported ({error})"
            ) from error
        collectives.limit_waits(training.collective_timeout_s)
        self.model.lm_head.forward = self._head_forward
        if load_weights:
            check_stored_names(self.spec.hf_dir, self.spec.model_type)
            load_hub_weights(self.spec.hf_dir, dict(self._named_state()))
        if self.spec.optimizer is None:
            self.model.requires_grad_(False)
        else:
            named = self._named_parameters()
            decayed = {name for name, parameter in named if parameter.dim() > 1}
            self._optimizer = make_adamw(named, decayed, self.spec.optimizer)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._hub_names, self.model.parameters(), strict=True))

    def _named_state(self) -> list[tuple[str, Tensor]]:
        return [(name, p.detach()) for name, p in self._named_parameters()]

    def loss_factor(self, num_micro_batches: int) -> float:
        """Return 1: TorchTitan's FSDP sums gradients."""
        return 1.0

    def _forward(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        read_N = read_positions(batch, readouts)
        idle = read_N.numel() == 0
        if idle:
            # Use every weight nevertheless: all ranks have to run the same collectives.
            read_N = read_N.new_ones(1)
        self._wanted = (
            read_N - 1, targets_of(batch, read_N, self.spec.temperature, readouts)
        )  # fmt: skip
        try:
            rows = self.model(
                batch.input_ids_T.unsqueeze(0),
                positions=batch.position_ids_T.unsqueeze(0),
                attention_masks=Packing.from_cu_seqlens(batch.cu_seqlens),
            )[0].T
        finally:
            self._wanted = None
        rows = rows * 0.0 if idle else rows
        return whole_outputs(rows, read_N, batch, readouts, self.spec.model_type)

    def _head_forward(self, hidden: Tensor) -> Tensor:
        """Map (1, T, D) hidden states to (1, N, K) readouts, in place of the model's head."""
        if self._wanted is None:
            raise EngineError("the head computes log-probabilities of chosen tokens only")
        rows_N, targets = self._wanted
        weight, group, first_token = self.model.lm_head.weight, None, 0
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group()
            first_token = local_place("lm_head.weight", weight).offsets[0]
            weight = weight.to_local()
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local(grad_placements=[Partial()])
        rows = head_rows(
            hidden[0, rows_N],
            weight,
            targets,
            chunk_elements=tile_elements(hidden, chunked=self.spec.training.chunked_logprobs),
            group=group,
            first_token=first_token,
        )
        # Not a view: FSDP registers hooks on the outputs.
        return rows.T[None].clone(memory_format=torch.contiguous_format)

    def _clip_gradients(self, max_norm: float) -> float:
        return clip_across_meshes(self.model.parameters(), max_norm)

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream whole weights. Tensors must not be changed."""
        with self.eval_mode():
            for name, tensor in self._named_state():
                yield name, whole_tensor(tensor)

    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        """Stream this rank's shards."""
        with self.eval_mode():
            parts = [
                HeldPart(local_place(name, tensor), lambda tensor=tensor: local_values(tensor))
                for name, tensor in self._named_state()
            ]
            yield from stream_parts(owned_parts(parts))
