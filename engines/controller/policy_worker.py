"""One rank of the policy: its share of the trained model, and a rollout engine that serves it.

Promises: nothing is sampled from weights that were not synced and verified; a rank samples its
share of the prompts, and since every sample has its own seed the samples do not depend on how
many ranks there are. The reference model exists only when it was asked for.
Does not know: rewards, advantages, data, or where checkpoints are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engines.checkpoint.background import write_in_background
from engines.collectives import close_process_group
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.dispatch import Dispatch, dispatch
from engines.errors import RolloutError
from engines.rollout.create import behind_service, create_rollout_engine
from engines.rollout.service import RolloutService
from engines.training.base import BaseEngine
from engines.training.create import create_engine
from engines.training.spec import LossFn
from engines.types import (
    Completion,
    ModelOutputs,
    Readouts,
    RolloutRequest,
    TokenBatch,
    TrainMetrics,
)
from engines.weight_sync.base import Receipt, SyncReport, Transport
from engines.weight_sync.in_process import new_transport
from hardware.detection import check_planned, detect
from infra import env


@dataclass(frozen=True)
class ModelSource:
    """Weights on disk.

    Attributes:
        hf_dir: Hugging Face directory; holds the weights unless there is a checkpoint.
        checkpoint_dir: sharded checkpoint that holds them instead.
    """

    hf_dir: Path
    checkpoint_dir: Path | None = None


@dataclass(frozen=True)
class PolicySpec:
    """What a rank builds; plain data, so that it travels to other processes.

    Attributes:
        policy: weights to train.
        reference: frozen weights to stay near to, or None for no reference.
        serving_dir: Hugging Face directory that the rollout engine reads its configuration from.
        restore_optimizer: continue the optimizer of the policy's checkpoint.
        training: backend and numerics.
        optimizer: of the policy.
        total_num_steps: optimizer steps the schedule spans.
        rollout: engine that samples; None where nothing is sampled.
        temperature: of the distribution that logprobs speak of.
        platform: name for `hardware.detection.detect`.
        seed: of whatever the backend draws.
        device_kind: of `hardware.detection.check_planned`.
    """

    policy: ModelSource
    reference: ModelSource | None
    serving_dir: Path
    restore_optimizer: bool
    training: TrainingConfig
    optimizer: OptimizerConfig
    total_num_steps: int
    rollout: RolloutConfig | None
    temperature: float
    platform: str
    seed: int
    device_kind: str | None = None


class PolicyWorker:
    """The worker of a policy group; `initialize` before anything else."""

    def __init__(self, spec: PolicySpec) -> None:
        self._spec = spec
        self._platform, _ = detect(spec.platform)
        if self._platform.device_count() > 1:
            # Ray shows a rank its own device, where it knows the vendor's variable.
            index = int(env.LOCAL_RANK.get() or 0)
            self._platform.set_device(index % self._platform.device_count())
        check_planned(self._platform, spec.platform, spec.device_kind)
        self._policy = self._create_engine(spec.policy, spec.optimizer)
        self._reference: BaseEngine | None = None
        self._rollout: RolloutService | None = None

    def initialize(self) -> None:
        """Build the models and load their weights. Collective.

        Raises:
            ConfigError: the rollout engine cannot serve that model, dtype or those options.
        """
        # First, because it costs nothing and may refuse.
        rollout = self._spec.rollout
        if rollout is not None:
            dtype = rollout.dtype or self._spec.training.dtype
            engine = create_rollout_engine(
                rollout.engine,
                self._spec.serving_dir,
                behind_service(rollout),
                dtype,
                self._platform,
            )
            self._rollout = RolloutService([engine], rollout.timeout_s)
            self._new_transport = new_transport(self._spec.serving_dir, dtype, rollout.timeout_s)
        _load(self._policy, self._spec.policy, optimizer=self._spec.restore_optimizer)
        self._policy.leave_device()
        if self._spec.reference is not None and not self._adapter_off_is_reference:
            self._reference = self._create_engine(self._spec.reference, None)
            _load(self._reference, self._spec.reference, optimizer=False)
            self._reference.leave_device()

    @property
    def _adapter_off_is_reference(self) -> bool:
        """Whether the policy without its adapter is the reference.

        A fresh adapter begins on the weights it is given, those of an earlier adapter merged in;
        a continued one still stands on them.
        """
        spec = self._spec
        return spec.training.lora is not None and (
            spec.restore_optimizer or spec.policy == spec.reference
        )

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a split call this rank takes."""
        return self._policy.data_parallel_rank

    @dispatch(Dispatch.SPLIT)
    def train_mini_batch(self, batch: TokenBatch, loss_fn: LossFn) -> TrainMetrics:
        """One optimizer step on the whole batch."""
        return self._policy.train_batch(batch, loss_fn)

    @dispatch(Dispatch.RANK_ZERO)
    def performance_metrics(self) -> dict[str, float]:
        """`perf/*` of the optimizer steps since the last call."""
        return self._policy.performance_metrics()

    @dispatch(Dispatch.SPLIT)
    def infer(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        """What the policy says of a batch as it is now, on the CPU."""
        return self._policy.infer_batch(batch, readouts)

    @dispatch(Dispatch.SPLIT)
    def infer_logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs of the policy as it is now: (T,) float32 on the CPU."""
        return self._policy.infer_batch(batch).logprobs_T

    @dispatch(Dispatch.SPLIT)
    def infer_reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs of the frozen reference: (T,) float32 on the CPU."""
        if self._spec.reference is not None and self._adapter_off_is_reference:
            with self._policy.disable_adapter():
                return self._policy.infer_batch(batch).logprobs_T
        if self._reference is None:
            raise ValueError("this worker was built without a reference model")
        return self._reference.infer_batch(batch).logprobs_T

    @dispatch(Dispatch.SPLIT_ALL)
    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Sample every request.

        Args:
            requests: with ids that differ.

        Returns:
            For each request its completions, in the order of its seeds.

        Raises:
            DeadlineError: the batch was not finished in `rollout.timeout_s`.
            RolloutError: a sample came back twice or not at all.
        """
        return self._served().generate(requests)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int) -> SyncReport:
        """Serve the policy's weights as `version`; verified by digest. Collective."""
        return self._served().sync(self._new_transport, self.send_weights, version)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Have the rollout engine give its memory back, until the next sync."""
        self._served().sleep()

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_weights(self, transport: Transport) -> Receipt:
        """Send the policy's weights to engines elsewhere; returns what was sent. Collective."""
        return transport.send(iter(self._policy.get_per_tensor_param()))

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_frozen_weights(self, transport: Transport) -> Receipt:
        """Send what the policy's adapter stands on; as `send_weights`."""
        return transport.send(iter(self._policy.get_frozen_param()))

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_adapter(self, transport: Transport) -> Receipt:
        """Send the policy's adapter alone; as `send_weights`."""
        return transport.send(iter(self._policy.get_adapter_param()))

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path, step: int) -> None:
        """Write every rank's shard of weights and optimizer into `path`. Collective."""
        self._policy.save_checkpoint(path, step)

    @dispatch(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, path: Path, step: int) -> None:
        """Copy every rank's shard and go on; it is written in the background. Collective."""
        write_in_background(self._policy.begin_checkpoint(path, step), path, self._policy.rank)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> int:
        """Continue from weights and optimizer in `path`; returns their step. Collective."""
        step = self._policy.load_checkpoint(path, optimizer=True)
        self._policy.leave_device()
        return step

    def close(self) -> None:
        """Free the rollout engine and leave the process group; once is enough.

        The group is the process's default one: other workers of this process end with it.
        """
        try:
            if self._rollout is not None:
                self._rollout.close()
        finally:
            close_process_group()

    def _served(self) -> RolloutService:
        if self._rollout is None:
            raise RolloutError("this worker was built without a rollout engine")
        return self._rollout

    def _create_engine(self, source: ModelSource, optimizer: OptimizerConfig | None) -> BaseEngine:
        spec = self._spec
        return create_engine(
            "language_model",
            source.hf_dir,
            spec.training,
            optimizer,
            spec.total_num_steps,
            self._platform,
            spec.seed,
            temperature=spec.temperature,
        )


def _load(engine: BaseEngine, source: ModelSource, *, optimizer: bool) -> None:
    """Build an engine's model and fill it from the directory or the checkpoint."""
    engine.initialize(load_weights=source.checkpoint_dir is None)
    if source.checkpoint_dir is not None:
        engine.load_checkpoint(source.checkpoint_dir, optimizer=optimizer)
