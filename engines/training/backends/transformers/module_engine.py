"""Engines of one module and one AdamW, whose checkpoints hold tensors by name.

Promises: such backends share one checkpoint format, so each can load what another stored. A start
from a checkpoint without its optimizer merges an adapter of the checkpoint into the weights.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.engine_state import (
    AVERAGE,
    MODEL_PREFIX,
    TENSORS_DIR,
    EngineScalars,
    load_engine_state,
    read_scalars,
    save_engine_state,
    stage_engine_state,
)
from engines.checkpoint.hub_names import HubNames, named_state
from engines.checkpoint.sharded import ShardedReader, load_sharded, own_regions
from engines.collectives import whole_tensor
from engines.config.training import LoraConfig, OptimizerConfig
from engines.errors import CheckpointError, EngineError
from engines.training.backends.transformers.adapters import (
    assign,
    base_name,
    initialize_adapter,
    is_adapter_name,
    stored_adapter,
    wrapped_name,
)
from engines.training.backends.transformers.build import build_on_meta
from engines.training.base import BaseEngine
from engines.training.engine_backend import HeldTensors
from engines.training.host_state import HostState
from engines.training.spec import VALUE_HEAD, EngineSpec
from engines.training.step.optimizer_step import Averaged, started_adamw
from engines.weight_places import local_values

PART_BYTES = 1 << 28
"""Bytes of moments that an offloaded step moves at a time."""
DATA = "data"
"""Mesh dimension of the ranks that hold different data."""
Model = TypeVar("Model", bound=nn.Module)


class ModuleEngine(BaseEngine, Generic[Model]):
    """Engine over one module and, if it trains, its optimizer; `initialize` creates both."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._model: Model | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._mesh: DeviceMesh | None = None
        self._staging = StagingBuffers()

    @property
    def model(self) -> Model:
        """The module.

        Raises:
            EngineError: `initialize` was not called.
        """
        if self._model is None:
            raise EngineError("the engine is not initialized: call initialize() first")
        return self._model

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different data: one rank of every group that shares sequences."""
        return self._mesh.get_group(DATA) if self._mesh is not None else None

    def _begin_micro_batch(self, *, is_last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(is_last)

    def _end_inference(self) -> None:
        # Without a backward pass the root keeps its gathered weights, which would
        # replace the sharded master weights until the next one.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _apply_optimizer(self, lr: float) -> None:
        if self._optimizer is None:
            raise EngineError("this engine was made without an optimizer: it cannot train")
        groups = self._optimizer.param_groups
        for group in groups:
            group["lr"] = lr
        if self._host_state is None or not self._brings_moments:
            self._optimizer.step()
            return
        # AdamW updates each parameter by itself, so parts give the bits of one step.
        whole = [group["params"] for group in groups]
        parts = step_parts(p for params in whole for p in params if p.grad is not None)
        states = [self._moments_of(part) for part in parts]
        try:
            for i in self._host_state.visit(states):
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = [p for p in params if p in parts[i]]
                self._optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    @property
    def _brings_moments(self) -> bool:
        return (
            self.spec.training.optimizer_offload
            and self._ema is None
            and self._host_state is not None
        )

    @cached_property
    def _host_state(self) -> HostState | None:
        return HostState.of(self.spec.platform)

    def _moments_of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return Adam's tensors of parameters, without the counts of steps."""
        states = self._optimizer.state if self._optimizer is not None else {}
        return [t for p in parameters for t in states[p].values() if t.dim() > 0]

    def _averaged(self) -> Averaged:
        states: dict[Any, dict[str, Tensor]] = (
            dict(self._optimizer.state) if self._optimizer else {}
        )
        return [(local_values(p), local_values(state[AVERAGE])) for p, state in states.items()]

    def optimizer_zero_grad(self) -> None:
        """Free all gradients."""
        self.model.zero_grad(set_to_none=True)

    @classmethod
    def stored_weights(cls, checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
        """Stream a checkpoint's whole weights by hub name on the CPU, without a process group.

        Raises:
            CheckpointError: weights are missing, superfluous or of another shape.
        """
        lora = read_scalars(checkpoint).lora
        reader = ShardedReader(checkpoint / TENSORS_DIR)
        stored = {
            name.removeprefix(MODEL_PREFIX): reader.shape(name)
            for name in reader.names()
            if name.startswith(MODEL_PREFIX)
        }
        model = build_on_meta(
            hf_dir, "value_model" if f"{VALUE_HEAD}weight" in stored else "language_model"
        )
        expected = {name: tuple(tensor.shape) for name, tensor in named_state(model)}
        names = {base_name(name): name for name in stored if not is_adapter_name(name)}
        held = {name: stored[at] for name, at in names.items()}
        if held != expected:
            wrong = sorted(name for name, _ in held.items() ^ expected.items())
            raise CheckpointError(
                f"{checkpoint}: does not fit {hf_dir / 'config.json'} at {', '.join(wrong[:3])}"
            )

        def whole(name: str) -> Tensor:
            tensor = reader.read(MODEL_PREFIX + names[name])
            adapter = stored_adapter(name, reader, lora) if lora else None
            return tensor if adapter is None else adapter.merged_into(tensor)

        yield from HubNames(model).stream((name, whole(name)) for name in expected)

    def held_tensors(self) -> HeldTensors:
        """Return parameters, their gradients, and the optimizer's tensors."""
        parameters = list(self.model.parameters())
        states: Collection[dict[str, Tensor]] = (
            self._optimizer.state.values() if self._optimizer is not None else ()
        )
        return HeldTensors(
            [self.model],
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state[name] for state in states for name in self._stored_state],
        )

    def to(
        self, device: torch.device | str, *, model: bool = True, optimizer: bool = True,
        grad: bool = True,
    ) -> None:  # fmt: skip
        """Move weights with their gradients, and optimizer state."""
        if model:
            if not grad:
                self.optimizer_zero_grad()
            nn.Module.to(self.model, device)
        if optimizer and self._optimizer is not None and self._host_state is not None:
            self._host_state.move(self._moments_of(self._optimizer.state), device)

    def save_checkpoint(self, path: Path, step: int) -> None:
        """Write this rank's shard."""
        with self._state_scope():
            tensors, scalars = self._state_of(self._named_state(), self._optimizer_states(), step)
            save_engine_state(path, own_regions(tensors), scalars, self.spec.platform)

    def begin_checkpoint(self, path: Path, step: int) -> Callable[[], None]:
        """Copy this rank's shard to the host; the returned function writes it."""
        with self._state_scope():
            tensors, scalars = self._state_of(self._named_state(), self._optimizer_states(), step)
            return stage_engine_state(
                path, own_regions(tensors), scalars, self.spec.platform, self._staging
            )

    def load_checkpoint(self, path: Path, *, optimizer: bool = True) -> int:
        """Restore a checkpoint; without the optimizer, merge a stored adapter."""
        stored = read_scalars(path)
        with self._state_scope(), self._loading() as (model, states):
            if optimizer:
                self._num_averaged = stored.num_averaged if self._ema is not None else None
                tensors, own = self._state_of(model, states, 0)
                load_engine_state(path, tensors, own.lora, self.spec.platform)
                for values in states.values():
                    values["step"].fill_(float(stored.num_optimizer_steps))
            else:
                load_folded(path, dict(model), stored.lora)
                if self.spec.training.lora is not None and self.spec.optimizer is not None:
                    initialize_adapter(dict(model), self.spec.seed)
        return self._continue_from(stored, optimizer=optimizer)

    def _state_scope(self) -> AbstractContextManager[None]:
        return self.eval_mode()

    @contextmanager
    def _loading(self) -> Iterator[tuple[list[tuple[str, Tensor]], dict[str, dict[str, Tensor]]]]:
        """Scope that yields weights and optimizer states to fill in place."""
        yield self._named_state(), self._optimizer_states()

    @abstractmethod
    def _named_state(self) -> list[tuple[str, Tensor]]:
        """Return parameters and persistent buffers, sharded as they are held. Collective."""

    @abstractmethod
    def _named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return parameters as they are held, by their names in checkpoints."""

    def _optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Return Adam's tensors by parameter name, sharded as they are held. Collective."""
        if self._optimizer is None:
            return {}
        states: dict[Any, dict[str, Tensor]] = dict(self._optimizer.state)
        return {name: states[p] for name, p in self._named_parameters() if p.requires_grad}

    def _state_of(
        self, model: list[tuple[str, Tensor]], states: dict[str, dict[str, Tensor]], step: int
    ) -> tuple[dict[str, Tensor], EngineScalars]:
        tensors = {f"{MODEL_PREFIX}{name}": tensor.detach() for name, tensor in model}
        for name, values in states.items():
            for key in self._stored_state:
                tensors[f"optimizer.{key}.{name}"] = values[key]
        first = next(iter(states.values()), None)
        return tensors, self._scalars(step, int(first["step"]) if first else 0)


def step_parts(parameters: Iterable[nn.Parameter]) -> list[set[nn.Parameter]]:
    """Split parameters, in order, into parts whose moments have about `PART_BYTES`."""
    parts: list[set[nn.Parameter]] = []
    num_bytes = PART_BYTES
    for parameter in parameters:
        if num_bytes >= PART_BYTES:
            parts.append(set())
            num_bytes = 0
        parts[-1].add(parameter)
        num_bytes += 2 * local_values(parameter).nbytes
    return parts


def decayed_names(model: nn.Module) -> set[str]:
    """Return names of parameters with weight decay: not one-dimensional ones (norms, biases)."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() > 1}


def make_adamw(
    named: Iterable[tuple[str, nn.Parameter]], decayed: Collection[str], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Create AdamW over the trained parameters."""
    groups: dict[tuple[bool, DeviceMesh | None], dict[str, Any]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            # The fused step takes tensors of one mesh; tensor parallelism has two.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            weight_decay = config.weight_decay if name in decayed else 0.0
            group = {"params": list[nn.Parameter](), "weight_decay": weight_decay}
            groups.setdefault((name in decayed, mesh), group)["params"].append(parameter)
    return started_adamw(list(groups.values()), config)


@torch.no_grad()
def load_folded(path: Path, named: Mapping[str, Tensor], lora: LoraConfig | None) -> None:
    """Fill weights from a checkpoint, with its adapter (if `lora`) merged in. Collective.

    Raises:
        CheckpointError: a tensor is absent or has another shape.
    """
    reader = ShardedReader(path / TENSORS_DIR)
    own = {base_name(name): tensor for name, tensor in named.items() if not is_adapter_name(name)}
    wanted: dict[str, Tensor] = {}
    for name, tensor in own.items():
        plain, wrapped = MODEL_PREFIX + name, MODEL_PREFIX + wrapped_name(name)
        wanted[plain if plain in reader or wrapped not in reader else wrapped] = tensor
    load_sharded(path / TENSORS_DIR, wanted)
    if lora is not None:
        num_merged = 0
        for name, tensor in own.items():
            adapter = stored_adapter(name, reader, lora)
            if adapter is not None:
                assign(tensor, adapter.merged_into(whole_tensor(tensor)))
                num_merged += 1
        if num_merged == 0:
            raise CheckpointError(f"{path} names an adapter, but its files hold no adapter")
