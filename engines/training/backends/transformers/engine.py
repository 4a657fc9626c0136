"""Engines whose model is a transformers module with plain or DTensor parameters.

Master weights are float32; computation is in `training.dtype`. A backend implements `_build_model`
and the reduction of gradients.

Promises: equal calls give equal bits on a CPU.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from engines import collectives
from engines.checkpoint.hub_names import HubNames, Slot, hub_slots, named_state
from engines.checkpoint.model_directory import rotary_limit
from engines.collectives import whole_tensor
from engines.errors import EngineError
from engines.training.backends.transformers.adapters import (
    adapter_state,
    base_name,
    has_adapter,
    is_adapter_name,
    merged_weight,
    merged_weights,
)
from engines.training.backends.transformers.build import (
    build_on_meta,
    enable_activation_checkpointing,
)
from engines.training.backends.transformers.head import LogprobHead
from engines.training.backends.transformers.module_engine import (
    DATA,
    ModuleEngine,
    decayed_names,
    make_adamw,
)
from engines.training.backends.transformers.vision import Vision, sees_images
from engines.training.model.attention import Packing, slice_sequence
from engines.training.model.image_layout import ImageLayout
from engines.training.model.linear_logprobs import targets_of
from engines.training.model.logprobs import compute_in_float32
from engines.training.outputs import read_positions, whole_outputs
from engines.training.spec import VALUE_HEAD, EngineSpec
from engines.training.weight_shards import HeldPart, owned_parts, parts_in_slots, stream_parts
from engines.types import ModelOutputs, Readouts, TokenBatch
from engines.weight_places import WeightShard, local_place, local_values

_ULYSSES = "ulysses"


class TransformersModelEngine(ModuleEngine[PreTrainedModel]):
    """`BaseEngine` over a transformers module."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._head: LogprobHead | None = None
        self._vision: Vision | None = None

    @abstractmethod
    def _build_model(self, *, load_weights: bool) -> PreTrainedModel:
        """Build the model on this rank, or sharded over all ranks."""

    def initialize(self, *, load_weights: bool = True) -> None:
        """Build the model and, if it trains, its optimizer."""
        training, platform = self.spec.training, self.spec.platform
        self._join_ranks(alone_too=self._is_sharded())
        if dist.is_initialized():
            self._mesh = collectives.make_mesh(
                platform.device_name,
                (collectives.world_size() // training.ulysses_size, training.ulysses_size),
                (DATA, _ULYSSES),
                training.collective_timeout_s,
            )
        self._model = self._build_model(load_weights=load_weights)
        collectives.limit_waits(training.collective_timeout_s)
        if training.recomputes_layers:
            enable_activation_checkpointing(self._model)
        if sees_images(self._model.config):
            self._vision = Vision(self._model)
        if self.spec.model_type == "language_model":
            self._head = LogprobHead(self._model, chunked=self._chunked_logprobs)
        else:
            head = self._model.get_submodule(VALUE_HEAD.removesuffix("."))
            compute_in_float32(cast(torch.nn.Linear, head))
        if self.spec.optimizer is not None:
            self._optimizer = make_adamw(
                list(self._named_parameters()), self._decayed_names(), self.spec.optimizer
            )

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.model.named_parameters()

    def _decayed_names(self) -> set[str]:
        return decayed_names(self.model)

    @property
    def _image_layout(self) -> ImageLayout | None:
        return self._vision.layout if self._vision is not None else None

    @property
    def _rotary_limit(self) -> int | None:
        return rotary_limit(self.model.config.get_text_config().to_dict())

    def _is_sharded(self) -> bool:
        return collectives.world_size() > 1 or self.spec.training.dtype != "float32"

    @property
    def _chunked_logprobs(self) -> bool:
        return self.spec.training.chunked_logprobs

    @property
    def _ulysses_group(self) -> dist.ProcessGroup | None:
        if self._mesh is None or self.spec.training.ulysses_size == 1:
            return None
        return self._mesh.get_group(_ULYSSES)

    def _forward(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        group = self._ulysses_group
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        part = slice_sequence(batch, rank, size)
        read_N = read_positions(batch, readouts, part)
        idle = read_N.numel() == 0
        if idle:
            # Use every weight nevertheless: all ranks have to run the same collectives.
            read_N = read_N.new_full((1,), part.start + 1)
        inputs = {
            "input_ids": part.input_ids_S.unsqueeze(0),
            "position_ids": part.position_ids_S.unsqueeze(0),
            "attention_mask": None,
            "use_cache": False,
            "packing": Packing.from_cu_seqlens(part.cu_seqlens, group),
        }
        if self._vision is not None:
            inputs |= self._vision.inputs(batch)
        rows_N = read_N - 1 - part.start
        if self._head is None:
            rows = self.model(**inputs).logits[0, rows_N, 0].float().unsqueeze(0)
        else:
            targets = targets_of(batch, read_N, self.spec.temperature, readouts)
            rows = self._head(rows_N, targets, **inputs)
        if idle:
            read_N, rows = read_N.clamp(max=batch.num_tokens), rows * 0.0
        return whole_outputs(rows, read_N, batch, readouts, self.spec.model_type, group)

    def loss_factor(self, num_micro_batches: int) -> float:
        """Return the number of ranks, which turns FSDP's mean of gradients over ranks into a sum.

        Ulysses ranks that share sequences each hold the gradient of their own tokens.
        """
        return float(collectives.world_size())

    def _set_adapter(self, enabled: bool) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer):
                # Not enable_adapters(): that also switches requires_grad of the parameters.
                module._disable_adapters = not enabled

    def _clip_gradients(self, max_norm: float) -> float:
        trained = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(trained, max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @cached_property
    def _names(self) -> HubNames:
        return HubNames(build_on_meta(self.spec.hf_dir, self.spec.model_type))

    @cached_property
    def _slots(self) -> Mapping[str, list[tuple[str, Slot]]]:
        """Parameter name in memory -> (hub name, slot) of each hub weight in the parameter."""
        found: dict[str, list[tuple[str, Slot]]] = {}
        model = build_on_meta(self.spec.hf_dir, self.spec.model_type)
        for hub_name, slot in hub_slots(model).items():
            found.setdefault(slot.parameter, []).append((hub_name, slot))
        return found

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream whole weights with the adapter merged in. Tensors must not be changed."""
        with self.eval_mode():
            state = self._named_state()
            yield from self._names.stream(
                ((name, whole_tensor(tensor)) for name, tensor in state)
                if self.spec.training.lora is None
                else merged_weights(dict(state), self._adapter_scaling)
            )

    def get_frozen_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the base weights below an adapter."""
        self._require_adapter()
        with self.eval_mode():
            yield from self._names.stream(
                (base_name(name), whole_tensor(tensor))
                for name, tensor in self._named_state()
                if not is_adapter_name(name)
            )

    def get_adapter_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the adapter without DoRA's magnitudes."""
        self._require_adapter()
        with self.eval_mode():
            yield from adapter_state(dict(self._named_state()))

    def _require_adapter(self) -> None:
        if self.spec.training.lora is None:
            raise EngineError("this engine trains all weights: it has no adapter")

    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        """Stream this rank's shards; a weight with an adapter is gathered to be merged.

        Raises:
            EngineError: a shard boundary cuts through a hub weight.
        """
        with self.eval_mode():
            yield from stream_parts(owned_parts(self._held_parts(dict(self._named_state()))))

    def _held_parts(self, named: Mapping[str, Tensor]) -> Iterator[HeldPart]:
        """Yield this rank's parts of the weights, adapters merged in; some may be empty."""
        for name, tensor in named.items():
            if is_adapter_name(name):
                continue
            inside = self._slots.get(base_name(name), [])
            if any(not slot.is_all_of(tensor) for _, slot in inside):
                yield from parts_in_slots(name, tensor, inside)
                continue
            place = local_place(inside[0][0] if inside else name, tensor)
            if has_adapter(name):
                whole = partial(merged_weight, name, named, self._adapter_scaling)
                yield HeldPart(place, lambda whole=whole, place=place: whole()[place.slices])
            else:
                yield HeldPart(place, partial(local_values, tensor))

    @property
    def _adapter_scaling(self) -> float:
        lora = self.spec.training.lora
        return lora.alpha / lora.rank if lora is not None else 0.0

    def _named_state(self) -> list[tuple[str, Tensor]]:
        return named_state(self.model)
