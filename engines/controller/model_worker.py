"""One rank: its part of every model of a run, and optionally a rollout engine for the policy.

Promises: nothing is sampled from weights that were not synced and verified; a rank samples its
share of the prompts, and since every sample has its own seed, the number of ranks changes samples
by rounding only. A checkpoint holds all roles that train.
Knows nothing of rewards, advantages, data, or where checkpoints are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from engines import remote_files
from engines.checkpoint.background import write_in_background
from engines.collectives import close_process_group
from engines.config.rollout import RolloutConfig
from engines.config.training import TrainingConfig
from engines.controller.worker_group import Dispatch, dispatch
from engines.cost.phase_bytes import Phase
from engines.errors import NonFiniteError, RolloutError
from engines.rollout.base import behind_service, create_rollout_engine
from engines.rollout.collect import Receive
from engines.rollout.service import RolloutService
from engines.training.base import BaseEngine, create_engine
from engines.training.memory_audit import MemoryAudit
from engines.training.spec import (
    POLICY,
    REFERENCE,
    LossFn,
    ModelSource,
    RoleName,
    RoleSpec,
)
from engines.types import (
    ONLY_LOGPROBS,
    Completion,
    ModelOutputs,
    PoisonedUpdate,
    Readouts,
    RolloutRequest,
    TokenBatch,
    TrainMetrics,
)
from engines.weight_sync.base import SyncReport, Transport, WeightDigest
from engines.weight_sync.communicator import close_communicators
from engines.weight_sync.in_process import new_transport
from engines.weight_sync.sharded import SendPlan, ShardedTransport
from hardware.detection import check_planned, detect, planned
from infra import env

ROLES_DIR = "roles"
"""Directory in a checkpoint for roles other than the policy, whose files are at the top."""


@dataclass(frozen=True)
class WorkerSpec:
    """Models that a rank builds: the policy and models beside it, or one frozen model.

    Attributes:
        serving_dir: Hugging Face directory with the rollout engine's configuration.
        rollout: engine that samples; None if nothing is sampled.
        temperature: sampling temperature of the distribution that logprobs refer to.
    """

    roles: Mapping[RoleName, RoleSpec]
    serving_dir: Path
    rollout: RolloutConfig | None
    temperature: float
    platform: str
    seed: int
    device_kind: str | None = None

    @property
    def leading(self) -> RoleName:
        """Role that is built first and determines the ranks and their devices."""
        return POLICY if POLICY in self.roles else next(iter(self.roles))

    @property
    def policy(self) -> RoleSpec:
        """The policy's role."""
        return self.roles[POLICY]

    @property
    def training(self) -> TrainingConfig:
        """Training configuration of the leading role, as its `EngineSpec` has it."""
        training, platform = self.roles[self.leading].training, planned(self.platform)
        return training.on(accelerator=platform.is_accelerator, has_compiler=False)


class ModelWorker:
    """Trains, infers and samples with the models of one rank; call `initialize` first."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec = _with_local_paths(spec)
        self._platform, _ = detect(spec.platform)
        if self._platform.device_count() > 1:
            # Ray hides other devices only for vendors whose visibility variable it knows.
            index = int(env.LOCAL_RANK.get() or 0)
            self._platform.set_device(index % self._platform.device_count())
        check_planned(self._platform, spec.platform, spec.device_kind)
        self._platform.choose_attention()
        self._engines: dict[RoleName, BaseEngine] = {
            spec.leading: self._create_engine(spec.roles[spec.leading])
        }
        self._rollout: RolloutService | None = None
        self._send_plan: SendPlan | None = None
        self._audit: MemoryAudit | None = None

    def initialize(self) -> None:
        """Build and load the models; raise ConfigError if the engine cannot serve. Collective."""
        spec, rollout, sampler = self._spec, self._spec.rollout, lambda: (0, 0)
        if rollout is not None:  # first, because it is cheap and may raise
            dtype = rollout.dtype or spec.training.dtype
            engine = create_rollout_engine(
                rollout.engine, spec.serving_dir, behind_service(rollout), dtype, self._platform
            )
            sampler = engine.held_bytes
            self._rollout = RolloutService([engine], rollout.timeout_s)
            self._new_transport = new_transport(
                spec.serving_dir, dtype, rollout.timeout_s, self._platform.device_name
            )
        _load(self._engines[spec.leading], spec.roles[spec.leading])
        if spec.training.memory_audit:
            self._audit = MemoryAudit(self._engines.values, self._platform, sampler)
        for name, role in spec.roles.items():
            if name not in self._engines and not (
                name == REFERENCE and self._adapter_off_is_reference
            ):
                self._engines[name] = self._create_engine(role)
                _load(self._engines[name], role)

    @property
    def _policy(self) -> BaseEngine:
        return self._engine(POLICY)

    @property
    def _adapter_off_is_reference(self) -> bool:
        """True if the policy without its adapter is the reference.

        A new adapter starts on the round's start weights, with an earlier adapter merged in. An
        adapter that is continued is on older base weights, so the base is not the policy the round
        starts with.
        """
        reference = self._spec.roles.get(REFERENCE)
        if reference is None or self._spec.policy.training.lora is None:
            return False
        policy = self._spec.policy
        return policy.restore_optimizer != (policy.source == reference.source)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the share that this rank takes of a split call."""
        return self._engine(self._spec.leading).data_parallel_rank

    @dispatch(Dispatch.SPLIT)
    def train(
        self, batch: TokenBatch, loss_fn: LossFn, role: RoleName = POLICY
    ) -> TrainMetrics | PoisonedUpdate:
        """Take one optimizer step of a role on the whole batch; the result is equal on every rank.

        The result is a `PoisonedUpdate`, with unchanged weights, if the loss or gradient is not
        finite.
        """
        try:
            with self._phase("train"):
                return self._engine(role).train_batch(batch.widened(), loss_fn)
        except NonFiniteError as error:
            return PoisonedUpdate(str(error))

    @dispatch(Dispatch.RANK_ZERO)
    def performance_metrics(self) -> dict[str, float]:
        """Return `perf/*` of the leading role's steps and `memory/*` since the last call."""
        audited = self._audit.take_metrics() if self._audit is not None else {}
        return self._engine(self._spec.leading).performance_metrics() | audited

    @dispatch(Dispatch.SPLIT)
    def infer(
        self, batch: TokenBatch, readouts: Readouts = ONLY_LOGPROBS, role: RoleName = POLICY
    ) -> ModelOutputs:
        """Run a forward pass of a role and return the outputs on the CPU."""
        with self._phase("train"):
            if role == REFERENCE and self._adapter_off_is_reference:
                with self._policy.disable_adapter():
                    return self._policy.infer_batch(batch.widened(), readouts)
            return self._engine(role).infer_batch(batch.widened(), readouts)

    @dispatch(Dispatch.SPLIT)
    def infer_logprobs(self, batch: TokenBatch, role: RoleName = POLICY) -> Tensor:
        """Return logprobs of a role, (T,) float32 on the CPU."""
        return self.infer(batch, role=role).logprobs_T

    @dispatch(Dispatch.SHARD_PER_RANK)
    def generate(
        self, requests: Sequence[RolloutRequest], on_completion: Receive | None = None
    ) -> list[list[Completion]]:
        """Sample every request; completions are in the order of each request's seeds.

        `on_completion` is as in `RolloutService.generate`; None if the caller is another process.
        """
        with self._phase("sample"):
            return self._served().generate(requests, on_completion)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int) -> SyncReport:
        """Serve the policy's weights as `version`, verified by digest. Collective."""
        return self._served().sync(
            self._new_transport, self.send_weights, version, leave_device=self.leave_device
        )

    @dispatch(Dispatch.ONE_TO_ALL)
    def leave_device(self) -> None:
        """Offload every role as configured and return unused memory to the device."""
        for engine in self._engines.values():
            engine.leave_device()

    @dispatch(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Release the rollout engine's memory until the next sync."""
        self._served().sleep()

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_weights(self, delivery: Transport | ShardedTransport) -> WeightDigest:
        """Send the policy's weights over `delivery`; return their digest. Collective."""
        with self._phase("sync"):
            if not isinstance(delivery, ShardedTransport):
                return delivery.send(iter(self._policy.get_per_tensor_param()))
            if self._send_plan is None:
                self._send_plan = delivery.plan(self._policy.get_per_tensor_param_shard())
            return delivery.send_parts(self._policy.get_per_tensor_param_shard(), self._send_plan)

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_frozen_weights(self, transport: Transport) -> WeightDigest:
        """Send the base weights under the policy's adapter. Collective."""
        return transport.send(iter(self._policy.get_frozen_param()))

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_adapter(self, transport: Transport) -> WeightDigest:
        """Send only the policy's adapter. Collective."""
        return transport.send(iter(self._policy.get_adapter_param()))

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path, step: int) -> None:
        """Write this rank's shards of every role that trains into `path`. Collective."""
        own = remote_files.current().own(path)
        for directory, engine in self._checkpointed(own):
            directory.mkdir(parents=True, exist_ok=True)
            engine.save_checkpoint(directory, step)
        remote_files.current().deliver(own, path)

    @dispatch(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, path: Path, step: int) -> None:
        """Copy this rank's shards and write them in the background. Collective."""
        writes: list[Callable[[], None]] = []
        disk = remote_files.current()
        own = disk.own(path)
        for directory, engine in self._checkpointed(own):
            directory.mkdir(parents=True, exist_ok=True)
            writes.append(engine.begin_checkpoint(directory, step))

        def write() -> None:
            for each in writes:
                each()
            disk.deliver(own, path)

        write_in_background(write, path, self._engine(self._spec.leading).rank)

    @dispatch(Dispatch.ONE_TO_ALL)
    def adopt_average(self) -> bool:
        """Replace weights by their moving average; True if a role has one. Collective."""
        return any([engine.adopt_average() for engine in self._engines.values()])  # all of them

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> int:
        """Restore every role that trains from `path` and return the step. Collective."""
        steps = []
        for directory, engine in self._checkpointed(remote_files.current().bring(path)):
            steps.append(engine.load_checkpoint(directory, optimizer=True))
            engine.leave_device()
        return steps[0]

    def close(self) -> None:
        """Free the rollout engine and destroy the default process group."""
        try:
            if self._rollout is not None:
                self._rollout.close()
        finally:
            close_communicators()
            close_process_group()

    def _phase(self, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext() if self._audit is None else self._audit.phase(phase)

    def _served(self) -> RolloutService:
        if self._rollout is None:
            raise RolloutError("this worker was built without a rollout engine")
        return self._rollout

    def _engine(self, role: RoleName) -> BaseEngine:
        if role not in self._engines:
            raise ValueError(f"this worker was built without a {role} model")
        return self._engines[role]

    def _checkpointed(self, path: Path) -> Iterator[tuple[Path, BaseEngine]]:
        """Yield the checkpoint directory and engine of each role that trains, the policy first."""
        for name, engine in self._engines.items():
            if engine.spec.optimizer is not None:
                yield role_checkpoint(path, name), engine

    def _create_engine(self, role: RoleSpec) -> BaseEngine:
        return create_engine(
            role.model_type,
            role.source.hf_dir,
            role.training,
            role.optimizer,
            role.total_num_steps,
            self._platform,
            self._spec.seed,
            temperature=self._spec.temperature,
        )


def role_checkpoint(path: Path, role: RoleName) -> Path:
    """Return the directory of a role in a checkpoint."""
    return path if role == POLICY else path / ROLES_DIR / role


def _with_local_paths(spec: WorkerSpec) -> WorkerSpec:
    """Return the spec with paths readable here; copies the driver's directories if needed."""
    bring = remote_files.current().bring
    roles: dict[RoleName, RoleSpec] = {}
    for name, role in spec.roles.items():
        checkpoint = role.source.checkpoint_dir and bring(role.source.checkpoint_dir)
        roles[name] = replace(role, source=ModelSource(bring(role.source.hf_dir), checkpoint))
    return replace(spec, roles=roles, serving_dir=bring(spec.serving_dir))


def _load(engine: BaseEngine, role: RoleSpec) -> None:
    """Build the model and load it from the Hugging Face directory or the checkpoint."""
    source = role.source
    engine.initialize(load_weights=source.checkpoint_dir is None)
    if source.checkpoint_dir is not None:
        engine.load_checkpoint(source.checkpoint_dir, optimizer=role.restore_optimizer)
    engine.leave_device()
