"""The FSDP2 engine for language models, on any platform and world size.

Promises: float32 master weights, gradients reduced in float32, computation in `training.dtype`;
equal calls give equal bits on a CPU. One process in float32 runs the plain module: no process
group, no sharding. AdamW (arXiv:1711.05101) decays every weight but the one-dimensional ones
(norms and biases).
Not covered: hybrid sharding, tensor and sequence parallelism; offload to host memory is done
between steps (`param_offload`), not within one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from engines.checkpoint.engine_state import EngineState, load_engine_state, save_engine_state
from engines.checkpoint.hub_names import HubNames, named_state
from engines.config.base import StrictModel
from engines.errors import EngineError
from engines.training import collectives
from engines.training.attention import Packing
from engines.training.base import BaseEngine, EngineSpec
from engines.training.fsdp.build import build_plain, build_sharded, enable_activation_checkpointing
from engines.training.logprobs import token_logprobs
from engines.types import ModelOutputs, TokenBatch


class FSDP2Options(StrictModel):
    """`training.options` of the backend fsdp2."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; false trades memory for speed."""


class FSDP2Engine(BaseEngine):
    """`BaseEngine` on torch's `fully_shard`."""

    Options = FSDP2Options

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._model: PreTrainedModel | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._mesh: DeviceMesh | None = None
        self._names: HubNames | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The transformers module.

        Raises:
            EngineError: `initialize` was not called.
        """
        if self._model is None:
            raise EngineError("the engine is not initialized: call initialize() first")
        return self._model

    def initialize(self, *, load_weights: bool = True) -> None:
        """Build the model, shard it when there are several ranks or a lower precision."""
        training, platform = self.spec.training, self.spec.platform
        if self.spec.optimizer is not None:
            platform.manual_seed(self.spec.seed + collectives.rank())
        dtype = getattr(torch, training.dtype)
        if dtype != torch.float32 and not dist.is_initialized():
            collectives.init_single_process_group(platform, training.collective_timeout_s)
        if collectives.world_size() > 1 or dtype != torch.float32:
            self._mesh = init_device_mesh(platform.device_name, (collectives.world_size(),))
            options = FSDP2Options.model_validate(training.options)
            self._model = build_sharded(
                self.spec.hf_dir,
                self._mesh,
                platform.device(),
                dtype,
                reshard_after_forward=options.reshard_after_forward,
                load_weights=load_weights,
            )
        else:
            self._model = build_plain(
                self.spec.hf_dir, platform.device(), load_weights=load_weights
            )
        if training.gradient_checkpointing:
            enable_activation_checkpointing(self.model)
        if self.spec.optimizer is None:
            self.model.requires_grad_(False)
        else:
            self._optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW with its state already there, so that every checkpoint holds the same tensors."""
        config = self.spec.optimizer
        if config is None:
            raise EngineError("this engine was made without an optimizer")
        parameters = list(self.model.parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1]},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """All ranks: every rank holds different data."""
        return self._mesh.get_group() if self._mesh is not None else None

    def loss_factor(self, num_micro_batches: int) -> float:
        """FSDP averages gradients over the ranks; the factor makes that a sum."""
        return float(self.data_parallel_size if self._mesh is not None else 1)

    def _forward(self, batch: TokenBatch, *, entropy: bool) -> ModelOutputs:
        predicted_N = _predicted_positions(batch)
        idle = predicted_N.numel() == 0
        if idle:
            # Every weight must be touched all the same: the ranks run the same collectives.
            predicted_N = predicted_N.new_zeros(1)
        logits_NV = self.model(
            input_ids=batch.input_ids_T.unsqueeze(0),
            position_ids=batch.position_ids_T.unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=predicted_N - 1,
            packing=Packing.from_cu_seqlens(batch.cu_seqlens),
        ).logits.squeeze(0)
        logprobs_N, entropy_N = token_logprobs(
            logits_NV,
            batch.input_ids_T[predicted_N],
            temperature=self.spec.temperature,
            entropy=entropy,
        )
        if idle:
            logprobs_N = logprobs_N * 0.0
            entropy_N = None if entropy_N is None else entropy_N * 0.0
        zeros_T = torch.zeros(batch.num_tokens, device=logits_NV.device)
        return ModelOutputs(
            zeros_T.index_copy(0, predicted_N, logprobs_N),
            None if entropy_N is None else zeros_T.index_copy(0, predicted_N, entropy_N),
        )

    def _set_gradient_sync(self, enabled: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)

    def _set_training(self, training: bool) -> None:
        self.model.train(training)

    def _end_inference(self) -> None:
        # The root keeps its gathered weights for a backward pass that does not come; they would
        # stand in for the sharded master weights until the next one.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _clip_gradients(self, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _apply_optimizer(self, lr: float) -> None:
        if self._optimizer is None:
            raise EngineError("this engine was made without an optimizer: it cannot train")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def optimizer_zero_grad(self) -> None:
        """Free all gradients."""
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """See `BaseEngine`; tensors lie on the device and must not be changed."""
        with self.eval_mode():
            whole = (
                (name, x.full_tensor() if isinstance(x, DTensor) else x.detach())
                for name, x in named_state(self.model)
            )
            yield from self._hub_names().stream(whole)

    def _hub_names(self) -> HubNames:
        if self._names is None:
            self._names = HubNames(self.model)
        return self._names

    def to(
        self, device: torch.device | str, *, model: bool = True, optimizer: bool = True,
        grad: bool = True,
    ) -> None:  # fmt: skip
        """Move weights (gradients go with them) and optimizer state."""
        if model:
            if not grad:
                self.optimizer_zero_grad()
            torch.nn.Module.to(self.model, device)
        if optimizer and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    state[name] = value.to(device)

    def save_checkpoint(self, path: Path, step: int) -> None:
        """See `BaseEngine`."""
        save_engine_state(path, self._state(step, optimizer=True), self.spec.platform)

    def load_checkpoint(self, path: Path, *, optimizer: bool = True) -> int:
        """See `BaseEngine`."""
        state = self._state(0, optimizer=optimizer)
        with self.eval_mode():
            loaded = load_engine_state(path, state, self.spec.platform, resume=optimizer)
        if optimizer:
            self.num_steps, self._schedule_step = loaded.num_steps, loaded.schedule_step
            for values in self._optimizer_states().values():
                values["step"].fill_(float(loaded.num_optimizer_steps))
        return loaded.step

    def _state(self, step: int, *, optimizer: bool) -> EngineState:
        named = named_state(self.model)
        tensors = {f"model.{name}": tensor.detach() for name, tensor in named}
        states = self._optimizer_states() if optimizer else {}
        for name, values in states.items():
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer.{key}.{name}"] = values[key]
        first = next(iter(states.values()), None)
        return EngineState(
            tensors=tensors,
            step=step,
            num_steps=self.num_steps,
            schedule_step=self._schedule_step,
            num_optimizer_steps=int(first["step"]) if first else 0,
        )

    def _optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Adam's tensors by parameter name."""
        if self._optimizer is None:
            return {}
        states = cast(dict[Tensor, dict[str, Tensor]], self._optimizer.state)
        return {name: states[p] for name, p in self.model.named_parameters()}


def _predicted_positions(batch: TokenBatch) -> Tensor:
    """(N,) int64 positions whose token is predicted.

    Those in `loss_mask`; all but the first of each sequence when there is no such column.
    """
    wanted_T = torch.ones_like(batch.input_ids_T, dtype=torch.bool)
    wanted_T[batch.cu_seqlens[:-1].to(torch.int64)] = False
    mask_T = batch.columns.get("loss_mask")
    if mask_T is not None:
        wanted_T &= mask_T != 0
    return wanted_T.nonzero().squeeze(1)
