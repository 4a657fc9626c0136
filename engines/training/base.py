"""BaseEngine: one training API whatever the backend.

What lives here, once: micro-batching by token budget, gradient accumulation, global-count
normalisation and the backend's data-parallel factor, the non-finite guard, the schedule,
offload scopes, metrics. What a backend brings: build and shard the model, one forward,
clip-and-step, gather a parameter, its state dict (the abstract methods).

The loss contract: a loss function returns a sum divided by a *global* count (`LossOutput`).
The result therefore does not depend on micro-batching, packing or data-parallel size; a test
permutes the splits for every backend and every loss.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from engines.config.base import StrictModel
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.errors import EngineError, NonFiniteError
from engines.training import collectives
from engines.training.micro_batches import MicroBatch, cut, filler, plan_micro_batches
from engines.training.schedule import learning_rate
from engines.training.totals import Totals, loss_counts
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch, TrainMetrics
from hardware.base import PlatformBase
from infra.errors import ConfigError

LossFn = Callable[[ModelOutputs, TokenBatch, GlobalCounts], LossOutput]
"""A loss function; its attribute `needs_entropy: bool` (default False) asks for entropies."""

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made from.

    Attributes:
        hf_dir: Hugging Face directory of the model.
        training: backend, numerics, token budget.
        optimizer: None makes an engine that only infers (a reference model).
        total_steps: optimizer steps of the run, for the schedule.
        platform: the device.
        seed: of everything random in the engine.
        temperature: log-probabilities are those of softmax(logits / temperature), so that they
            speak of the distribution that was sampled from.
    """

    hf_dir: Path
    training: TrainingConfig
    optimizer: OptimizerConfig | None
    total_steps: int
    platform: PlatformBase
    seed: int
    temperature: float = 1.0


class BaseEngine(ABC):
    """One rank's part of a training engine; every rank makes the same calls in the same order.

    Args:
        spec: what to make it from.

    Attributes:
        Options: schema of `training.options` for this backend.
        spec: what it was made from.
        num_steps: optimizer steps taken so far.
    """

    Options: type[StrictModel] = StrictModel

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.num_steps = 0
        self._schedule_step = 0
        self._mode: Mode | None = None

    # What a backend brings.

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
    def _forward(self, batch: TokenBatch, *, entropy: bool) -> ModelOutputs:
        """One forward pass of a micro-batch that lies on the device."""

    @abstractmethod
    def _set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward pass reduces gradients over the ranks."""

    @abstractmethod
    def _set_training(self, training: bool) -> None:
        """Switch the model between training and evaluation behaviour."""

    def _end_inference(self) -> None:  # noqa: B027 (most backends leave nothing behind)
        """Give back what forward passes without a backward pass left behind."""

    @abstractmethod
    def _clip_gradients(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before."""

    @abstractmethod
    def _apply_optimizer(self, lr: float) -> None:
        """One optimizer step at this learning rate."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights by the names that `save_pretrained` would write, each whole.

        Collective: every rank walks the iterator to its end. Holds one whole tensor at a time;
        tied weights come once.
        """

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

    # The engine's place among its peers.

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return collectives.world_size()

    @property
    def rank(self) -> int:
        """Of this process among them."""
        return collectives.rank()

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold different data."""
        return dist.get_world_size(self.data_parallel_group) if dist.is_initialized() else 1

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the data is this rank's."""
        return dist.get_rank(self.data_parallel_group) if dist.is_initialized() else 0

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        if self.spec.optimizer is None:
            raise EngineError("this engine was made without an optimizer: it cannot train")
        return learning_rate(self._schedule_step, self.spec.optimizer, self.spec.total_steps)

    # Scopes.

    def train_mode(self) -> AbstractContextManager[None]:
        """Scope in which weights, gradients and optimizer are on the device."""
        return self._scope("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        """Scope in which the weights are on the device and no gradient is kept."""
        return self._scope("eval")

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Scope in which the model computes without its adapter; only for engines that have one."""
        raise EngineError("this engine trains all weights: there is no adapter to disable")
        yield

    @contextmanager
    def _scope(self, mode: Mode) -> Iterator[None]:
        if self._mode is not None:
            if mode == "train" and self._mode == "eval":
                raise EngineError("train_mode inside eval_mode: leave eval_mode first")
            yield
            return
        training, device = self.spec.training, self.spec.platform.device()
        self._mode = mode
        try:
            if training.param_offload:
                self.to(device, optimizer=False)
            if training.optimizer_offload and mode == "train":
                self.to(device, model=False, grad=False)
            yield
        finally:
            self._mode = None
            if training.param_offload:
                self.to("cpu", optimizer=False)
            if training.optimizer_offload and mode == "train":
                self.to("cpu", model=False, grad=False)

    # One step.

    def train_batch(self, batch: TokenBatch, loss_fn: LossFn) -> TrainMetrics:
        """One optimizer step.

        Args:
            batch: this rank's share of the step, on the CPU, with a column `loss_mask`.
            loss_fn: see `LossFn`.

        Returns:
            The same on every rank.

        Raises:
            EngineError: a rank has no sequence, or no token of the step is trained on.
            NonFiniteError: the loss or the gradient norm is NaN or infinite on any rank; the
                weights are as before.
            ConfigError: a sequence exceeds the token budget.
        """
        lr = self.lr
        counts, num_tokens, micro_batches = self._prepare(batch)
        if counts.num_tokens == 0:
            raise EngineError("no token of this step is trained on: loss_mask is 0 everywhere")
        with self.train_mode():
            self._set_training(True)
            self.optimizer_zero_grad()
            totals = Totals(self.spec.platform.device())
            factor = self.loss_factor(len(micro_batches))
            for i, micro in enumerate(micro_batches):
                self._set_gradient_sync(i == len(micro_batches) - 1)
                _, output = self.forward_step(micro.batch, loss_fn, counts)
                (output.loss * factor).backward()
                totals.add(output)
            loss, metrics = totals.reduce(self.data_parallel_group)
            if not math.isfinite(loss):
                raise NonFiniteError(f"loss is {loss} at optimizer step {self.num_steps}")
            grad_norm = self.optimizer_step()
            self.lr_scheduler_step()
            self.optimizer_zero_grad()
        return TrainMetrics(loss, grad_norm, lr, num_tokens, metrics)

    def infer_batch(self, batch: TokenBatch, entropy: bool = False) -> ModelOutputs:
        """Log-probabilities without gradient.

        Args:
            batch: this rank's share, on the CPU. With a column `loss_mask`, only the positions
                where it is not 0 are computed; the others are 0.
            entropy: also yield entropies.

        Returns:
            In the order of `batch`, on the CPU.
        """
        _, _, micro_batches = self._prepare(batch)
        logprobs_T = torch.zeros(batch.num_tokens)
        entropy_T = torch.zeros(batch.num_tokens) if entropy else None
        with self.eval_mode(), torch.no_grad():
            self._set_training(False)
            for micro in micro_batches:
                outputs = self._forward(
                    micro.batch.to(self.spec.platform.device()), entropy=entropy
                )
                if micro.token_index_T is None:
                    continue
                logprobs_T[micro.token_index_T] = outputs.logprobs_T.cpu()
                if entropy_T is not None and outputs.entropy_T is not None:
                    entropy_T[micro.token_index_T] = outputs.entropy_T.cpu()
            self._end_inference()
        return ModelOutputs(logprobs_T, entropy_T)

    def forward_step(
        self, micro_batch: TokenBatch, loss_fn: LossFn, counts: GlobalCounts
    ) -> tuple[ModelOutputs, LossOutput]:
        """Forward pass and loss of one micro-batch; the loss carries no data-parallel factor.

        Positions outside of `loss_mask` are not computed: their log-probability is 0.
        """
        batch = micro_batch.to(self.spec.platform.device())
        outputs = self._forward(batch, entropy=bool(getattr(loss_fn, "needs_entropy", False)))
        return outputs, loss_fn(outputs, batch, counts)

    def optimizer_step(self) -> float:
        """Clip, check and step.

        Returns:
            The global gradient norm before clipping.

        Raises:
            NonFiniteError: the norm is NaN or infinite; the weights are as before.
        """
        if self.spec.optimizer is None:
            raise EngineError("this engine was made without an optimizer: it cannot train")
        grad_norm = self._clip_gradients(self.spec.optimizer.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"gradient norm is {grad_norm} at optimizer step {self.num_steps}")
        self._apply_optimizer(self.lr)
        self.num_steps += 1
        return grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step; returns the next learning rate."""
        self._schedule_step += 1
        return self.lr

    def memory_metrics(self) -> dict[str, float]:
        """Memory of this rank, in GB of 10**9 bytes."""
        platform = self.spec.platform
        return {"perf/max_memory_allocated_gb": platform.max_memory_allocated_bytes() / 1e9}

    def _prepare(self, batch: TokenBatch) -> tuple[GlobalCounts, int, list[MicroBatch]]:
        """Agree with the other ranks on counts and on the number of micro-batches.

        Everything that may be wrong with a batch is checked after the exchange, so that all
        ranks raise together and none is left waiting in a collective.
        """
        budget = self.spec.training.max_tokens_per_micro_batch
        lengths = batch.lengths_B.tolist()
        plan = plan_micro_batches(lengths, budget)
        sums = [*loss_counts(batch), batch.num_tokens]
        maxima = [len(plan), max(lengths, default=0), -len(lengths), -min(lengths, default=1)]
        rows = collectives.gather_rows(
            [*sums, *maxima], self.spec.platform.device(), self.data_parallel_group
        )
        num_tokens, num_sequences, total = collectives.column_sums([row[:3] for row in rows])
        num_micro, longest, fewest, shortest = collectives.column_maxima([row[3:] for row in rows])
        if fewest == 0:
            raise EngineError(f"a rank has no sequence; give each of {len(rows)} ranks one or more")
        if shortest == 0:
            raise EngineError("a sequence has no token")
        if longest > budget:
            raise ConfigError(
                "training.max_tokens_per_micro_batch",
                f"got {budget}; need at least {int(longest)}, the longest sequence; raise it",
            )
        if num_micro > len(plan):
            plan = plan_micro_batches(lengths, budget, min_num=int(num_micro))
        micro_batches = cut(batch, plan)
        # A filler runs first: the last micro-batch, which reduces gradients, is a real one.
        missing = int(num_micro) - len(micro_batches)
        micro_batches = [filler(batch) for _ in range(missing)] + micro_batches
        return GlobalCounts(int(num_tokens), int(num_sequences)), int(total), micro_batches
