"""BaseEngine: one training API for all backends.

Implements micro-batching by token budget, gradient accumulation, the non-finite guard, the
schedule, the moving average of the weights, offload scopes and metrics. `create_engine` creates the
engine of the configured backend.

Promises: a loss is a sum divided by a *global* count (`LossOutput`), so micro-batching and layout
change the result by rounding only. A backend's class is imported only when it is requested, so a
missing library is reported only when its backend is used.
"""

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.checkpoint.engine_state import AVERAGE, MOMENTS, EngineScalars
from engines.config.backends import ENGINES, engine_name
from engines.config.options import check_options
from engines.config.training import EmaConfig, OptimizerConfig, TrainingConfig, check_layout
from engines.errors import EngineError, NonFiniteError
from engines.training.engine_backend import EngineBackend
from engines.training.outputs import from_columns, num_columns, num_others, to_columns
from engines.training.spec import EngineSpec, LossFn, ModelType
from engines.training.step.flops import ModelFlops, TrainingFlops
from engines.training.step.micro_batches import Preparation, Totals, prepare
from engines.training.step.optimizer_step import (
    StepMeter,
    decay_of_step,
    learning_rate,
    move_average,
    start_average,
    take_average,
)
from engines.training.supported_models import check_vision
from engines.types import ONLY_LOGPROBS, ModelOutputs, Readouts, TokenBatch, TrainMetrics
from hardware.base import PlatformBase
from infra import env
from infra.errors import ConfigError
from infra.plugins import load_row

Mode = Literal["train", "eval"]


class BaseEngine(EngineBackend):
    """One rank of a training engine; all ranks make the same calls in the same order."""

    def __init__(self, spec: EngineSpec) -> None:
        check_vision(spec.hf_dir, spec.training, values=spec.model_type == "value_model")
        super().__init__(spec)
        if self._ema is not None and type(self)._averaged is EngineBackend._averaged:
            raise ConfigError(
                "optimizer.ema",
                f"got one; {spec.training.backend} keeps no average of its weights; need null; "
                "remove it, or choose another training.backend",
            )
        self.num_steps = 0
        self._schedule_step = 0
        self._mode: Mode | None = None
        self._num_averaged = 0 if self._ema is not None else None
        self._flops = flops_of(spec)
        self._max_tokens = spec.training.shared_tokens_per_micro_batch

    @property
    def world_size(self) -> int:
        """Number of ranks of the engine."""
        return collectives.world_size()

    @property
    def rank(self) -> int:
        """Rank of this process in the engine."""
        return collectives.rank()

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that hold different data."""
        return dist.get_world_size(self.data_parallel_group) if dist.is_initialized() else 1

    @property
    def data_parallel_rank(self) -> int:
        """Rank of this process in the data-parallel group."""
        return dist.get_rank(self.data_parallel_group) if dist.is_initialized() else 0

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return learning_rate(self._schedule_step, self._optimizer_config, self.spec.total_steps)

    @property
    def _optimizer_config(self) -> OptimizerConfig:
        if self.spec.optimizer is None:
            raise EngineError("this engine was made without an optimizer: it cannot train")
        return self.spec.optimizer

    def train_mode(self) -> AbstractContextManager[None]:
        """Scope in which weights and gradients are on the device."""
        return self._scope("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        """Scope in which the weights are on the device; `param_offload` drops the gradients."""
        return self._scope("eval")

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Scope in which the model computes without its adapter, as the reference.

        Raises:
            EngineError: the engine has no adapter, or the backend cannot switch it off.
        """
        if self.spec.training.lora is None:
            raise EngineError("this engine trains all weights: there is no adapter to disable")
        self._set_adapter(False)
        try:
            yield
        finally:
            self._set_adapter(True)

    @contextmanager
    def _scope(self, mode: Mode) -> Iterator[None]:
        if self._mode is not None:
            if mode == "train" and self._mode == "eval":
                raise EngineError("train_mode inside eval_mode: leave eval_mode first")
            yield
            return
        self._mode = mode
        try:
            if self.spec.training.param_offload:
                self.to(self.spec.platform.device(), optimizer=False, grad=mode == "train")
            yield
        finally:
            self._mode = None
            if self.spec.training.param_offload:
                self.to("cpu", optimizer=False)

    @contextmanager
    def _optimizer_scope(self) -> Iterator[None]:
        """Scope in which the optimizer's state is on the device; inside a train scope."""
        offloads = self.spec.training.optimizer_offload
        if offloads:
            self.to(self.spec.platform.device(), model=False, grad=False)
        try:
            yield
        finally:
            if offloads:
                self.to("cpu", model=False, grad=False)

    def leave_device(self) -> None:
        """Offload as configured, and return the memory that is then unused to the device.

        Called between phases, when another process or the rollout engine needs the memory; not
        after each optimizer step, whose memory the next one takes again.

        Raises:
            EngineError: called inside a scope.
        """
        if self._mode is not None:
            raise EngineError(f"leave_device inside {self._mode}_mode: leave it first")
        if self.spec.training.param_offload:
            self.to("cpu", optimizer=False)
        if self.spec.training.optimizer_offload:
            self.to("cpu", model=False, grad=False)
        self.spec.platform.empty_cache()

    def train_batch(self, batch: TokenBatch, loss_fn: LossFn) -> TrainMetrics:
        """Take one optimizer step; `batch` is this rank's share, on the CPU, with a `loss_mask`.

        Raises:
            EngineError: as `prepare`, no token of the step is trained on, or the batch or the head
                lacks a readout of the loss.
            NonFiniteError: the loss or the gradient norm is NaN or infinite on any rank; the
                weights are unchanged.
            ConfigError: as `prepare`, such as a unit above the token budget.
        """
        lr = self.lr
        readouts = getattr(loss_fn, "readouts", ONLY_LOGPROBS)
        num_others(readouts, batch)  # raises before anything is computed
        ready = self._prepare(batch)
        if ready.counts.num_tokens == 0:
            raise EngineError("no token of this step is trained on: loss_mask is 0 everywhere")
        device = self.spec.platform.device()
        gather = partial(collectives.gather_ragged, device=device, group=self.data_parallel_group)
        extras = getattr(loss_fn, "extras", None)
        counts = replace(ready.counts, extras=dict(extras(batch, gather)) if extras else {})
        totals = Totals(device)
        factor = self.loss_factor(len(ready.micro_batches))

        def scaled_loss(outputs: ModelOutputs, micro_batch: TokenBatch) -> Tensor:
            output = loss_fn(outputs, micro_batch, counts)
            totals.add(output)
            return output.loss * factor

        with self.train_mode(), self._meter.step(ready.work):
            self.optimizer_zero_grad()
            self._forward_backward(
                [micro.batch for micro in ready.micro_batches], scaled_loss, readouts
            )
            loss, metrics, spoiled = self._reduced(totals)
            if not math.isfinite(loss):
                size = self.data_parallel_size
                ranks = ", ".join(map(str, spoiled)) or "none alone"
                where = f", on data-parallel ranks: {ranks} (of {size})" if size > 1 else ""
                raise NonFiniteError(f"loss is {loss} at optimizer step {self.num_steps}{where}")
            grad_norm = self.optimizer_step()
            self._schedule_step += 1
            self.optimizer_zero_grad()
            self.spec.platform.synchronize()  # the optimizer's work is part of the step's time
        return TrainMetrics(loss, grad_norm, lr, ready.work.num_tokens, metrics)

    def infer_batch(self, batch: TokenBatch, readouts: Readouts = ONLY_LOGPROBS) -> ModelOutputs:
        """Return logprobs or values, without gradient, on the CPU and in the order of `batch`.

        With a column `loss_mask`, only positions where it is not 0 are computed; the others are 0.
        Logprobs of a value model are 0; readouts that the model type does not have are None.

        Raises:
            EngineError, ConfigError: as `prepare`; or the batch or the head lacks a readout.
        """
        micro_batches = self._prepare(batch).micro_batches
        model_type = self.spec.model_type
        columns = torch.zeros(num_columns(readouts, model_type, batch), batch.num_tokens)
        with self.eval_mode(), torch.no_grad():
            outputs = self._infer([micro.batch for micro in micro_batches], readouts)
            for micro, output in zip(micro_batches, outputs, strict=False):
                if micro.token_index_T is not None:  # None: a filler micro-batch
                    columns[:, micro.token_index_T] = to_columns(output, micro.batch)
            self._end_inference()
            group = self.pipeline_group
            if group is not None:
                on_device = columns.to(self.spec.platform.device())
                last = dist.get_global_rank(group, dist.get_world_size(group) - 1)
                collectives.broadcast(on_device, src=last, group=group)
                columns = on_device.cpu()
        return from_columns(columns, batch, readouts, model_type)

    def optimizer_step(self) -> float:
        """Clip the gradients, check their norm, step, and return the norm before clipping.

        Raises:
            NonFiniteError: the norm is NaN or infinite; the weights are unchanged.
        """
        with nullcontext() if self._brings_moments else self._optimizer_scope():
            grad_norm = self._clip_gradients(self._optimizer_config.max_grad_norm)
            if not math.isfinite(grad_norm):
                step = self.num_steps
                raise NonFiniteError(f"gradient norm is {grad_norm} at optimizer step {step}")
            self._apply_optimizer(self.lr)
            self.num_steps += 1
            if self._ema is not None and self._num_averaged is not None:
                self._num_averaged += 1
                move_average(self._averaged(), decay_of_step(self._ema, self._num_averaged))
        return grad_norm

    def adopt_average(self) -> bool:
        """Set weights to their average, end averaging; False if there is no average. Collective."""
        if self._num_averaged is None:
            return False
        with self.train_mode(), self._optimizer_scope():
            take_average(self._averaged())
            self._weights_written()
        self._num_averaged = None
        return True

    @property
    def _ema(self) -> EmaConfig | None:
        return self.spec.optimizer.ema if self.spec.optimizer is not None else None

    def _continue_from(self, stored: EngineScalars, *, optimizer: bool) -> int:
        """Continue with loaded weights; return their step.

        Without `optimizer` the steps count from 0. An average that is not stored starts from the
        loaded weights.
        """
        num_averaged = stored.num_averaged if optimizer else None
        if self._ema is not None:
            if num_averaged is None:
                with self.train_mode(), self._optimizer_scope():
                    start_average(self._averaged())
            self._num_averaged = num_averaged or 0
        if optimizer:
            self.num_steps, self._schedule_step = stored.num_steps, stored.schedule_step
        return stored.step

    @property
    def _stored_state(self) -> tuple[str, ...]:
        return MOMENTS if self._num_averaged is None else (*MOMENTS, AVERAGE)

    def performance_metrics(self) -> dict[str, float]:
        """Return the speed since the last call and this rank's peak memory; see `StepMeter`."""
        return self._meter.take_metrics(self.spec.platform.max_memory_allocated_bytes())

    @cached_property
    def _meter(self) -> StepMeter:
        # Not in the constructor: there is no process group yet.
        return StepMeter(
            self.world_size, self.spec.platform.peak_flops_per_s(self.spec.training.dtype)
        )

    def _join_ranks(self, *, alone_too: bool = True) -> None:
        """Seed this rank if it trains; with `alone_too`, a lone process gets a process group."""
        spec = self.spec
        if spec.optimizer is not None:
            spec.platform.manual_seed(spec.seed + self.rank)
        if alone_too and not dist.is_initialized():
            collectives.init_single_process_group(spec.platform, spec.training.collective_timeout_s)

    def _scalars(self, step: int, num_optimizer_steps: int) -> EngineScalars:
        return EngineScalars(
            step=step,
            num_steps=self.num_steps,
            schedule_step=self._schedule_step,
            num_optimizer_steps=num_optimizer_steps,
            world_size=self.world_size,
            backend=self.spec.training.backend,
            lora=self.spec.training.lora if self.spec.optimizer is not None else None,
            num_averaged=self._num_averaged,
        )

    def _prepare(self, batch: TokenBatch) -> Preparation:
        return prepare(
            batch,
            self._max_tokens,
            self.spec.platform.device(),
            self.data_parallel_group,
            self._flops,
            image_layout=self._image_layout,
            rotary_limit=self._rotary_limit,
        )

    def _reduced(self, totals: Totals) -> tuple[float, dict[str, float], list[int]]:
        """Return `Totals.reduce` on every rank, also on earlier pipeline stages."""
        group = self.pipeline_group
        if group is None:
            return totals.reduce(self.data_parallel_group)
        last = dist.get_world_size(group) - 1
        reduced = totals.reduce(self.data_parallel_group) if dist.get_rank(group) == last else None
        return tuple(collectives.broadcast_json(reduced, last, group, self.spec.platform.device()))


def flops_of(spec: EngineSpec) -> TrainingFlops | None:
    """Return the FLOPs counter of an engine; None if its model cannot be counted."""
    values = spec.model_type == "value_model"
    try:
        config = json.loads((spec.hf_dir / "config.json").read_text(encoding="utf-8"))
        model = ModelFlops.from_config(config, num_outputs=1 if values else None)
    except (FileNotFoundError, ValueError):
        return None
    return TrainingFlops(
        model,
        weights_frozen=spec.training.lora is not None,
        layers_recomputed=spec.training.recomputes_layers,
        logits_recomputed=not values,
    )


def create_engine(
    model_type: ModelType,
    hf_dir: Path,
    training: TrainingConfig,
    optimizer: OptimizerConfig | None,
    total_steps: int,
    platform: PlatformBase,
    seed: int,
    *,
    temperature: float = 1.0,
) -> BaseEngine:
    """Create an engine of the configured backend; call `initialize` to build the model.

    Args:
        optimizer: None creates an engine that only infers.
        total_steps: optimizer steps of the run, for the schedule.
        platform: RLHF_ENGINE_DEVICE and RLHF_ENGINE_VENDOR override its names in the engine table.

    Raises:
        ConfigError: the platform has no such backend, or the backend lacks an option or layout.
    """
    check_layout(training)
    row = ENGINES.find(
        engine_name(training.backend, model_type),
        device=env.RLHF_ENGINE_DEVICE.get() or platform.device_name,
        vendor=env.RLHF_ENGINE_VENDOR.get() or platform.vendor_name,
    )
    if ENGINES.interpreter(training.backend, ENGINES.setting) is not None:
        raise ConfigError(
            ENGINES.setting,
            f"{training.backend} runs in a job environment of its own, not in this one",
        )
    check_options(training.options, [row], "training.options")
    spec = EngineSpec(
        hf_dir, training, optimizer, total_steps, platform, seed, temperature, model_type
    )
    return load_row(row, ENGINES.setting)(spec)
