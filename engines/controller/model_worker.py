"""One rank: its share of every model of a run, and a rollout engine that serves the policy.

Promises: nothing is sampled from weights that were not synced and verified; a rank samples its
share of the prompts, and since every sample has its own seed the samples do not depend on how
many ranks there are. A role exists only when it was asked for, and a checkpoint holds every role
that trains, or none of it.
Does not know: rewards, advantages, data, or where checkpoints are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from engines import driver_disk
from engines.checkpoint.background import write_in_background
from engines.collectives import close_process_group
from engines.config.rollout import RolloutConfig
from engines.config.training import TrainingConfig
from engines.controller.dispatch import Dispatch, dispatch
from engines.errors import NonFiniteError, RolloutError
from engines.rollout.collect import Receive
from engines.rollout.create import behind_service, create_rollout_engine
from engines.rollout.service import RolloutService
from engines.training.base import BaseEngine
from engines.training.create import create_engine
from engines.training.roles import (
    POLICY,
    REFERENCE,
    ModelSource,
    RoleName,
    RoleSpec,
    role_checkpoint,
)
from engines.training.spec import LossFn
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
from engines.weight_sync.base import Receipt, SyncReport, Transport
from engines.weight_sync.in_process import new_transport
from engines.weight_sync.send_plan import SendPlan
from engines.weight_sync.sharded import ShardedTransport
from hardware.detection import check_planned, detect
from infra import env


@dataclass(frozen=True)
class WorkerSpec:
    """What a rank builds.

    Attributes:
        roles: by name: the policy and what stands beside it, or one model that is never trained.
        serving_dir: Hugging Face directory that the rollout engine reads its configuration from.
        rollout: engine that samples; None where nothing is sampled.
        temperature: of the distribution that logprobs speak of.
        platform: name for `hardware.detection.detect`.
        seed: of whatever the backends draw.
        device_kind: of `hardware.detection.check_planned`.
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
        """The role that is built first and says how many ranks there are, and on what."""
        return POLICY if POLICY in self.roles else next(iter(self.roles))

    @property
    def policy(self) -> RoleSpec:
        """Of a worker that has one."""
        return self.roles[POLICY]

    @property
    def training(self) -> TrainingConfig:
        """Of the leading role."""
        return self.roles[self.leading].training


class ModelWorker:
    """The worker of a group; `initialize` before anything else."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec = _brought(spec)
        self._platform, _ = detect(spec.platform)
        if self._platform.device_count() > 1:
            # Ray shows a rank its own device, where it knows the vendor's variable.
            index = int(env.LOCAL_RANK.get() or 0)
            self._platform.set_device(index % self._platform.device_count())
        check_planned(self._platform, spec.platform, spec.device_kind)
        leading = spec.leading
        self._engines: dict[RoleName, BaseEngine] = {
            leading: self._create_engine(spec.roles[leading])
        }
        self._rollout: RolloutService | None = None
        self._send_plan: SendPlan | None = None

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
        leading = self._spec.leading
        _load(self._engines[leading], self._spec.roles[leading])
        for name, role in self._spec.roles.items():
            if name == leading or (name == REFERENCE and self._adapter_off_is_reference):
                continue
            self._engines[name] = self._create_engine(role)
            _load(self._engines[name], role)

    @property
    def _policy(self) -> BaseEngine:
        return self._engine(POLICY)

    @property
    def _adapter_off_is_reference(self) -> bool:
        """Whether the policy without its adapter is the reference.

        A fresh adapter begins on the weights it is given, those of an earlier adapter merged in;
        a continued one stands on weights from before the policy that the round starts with.
        """
        reference = self._spec.roles.get(REFERENCE)
        if reference is None or self._spec.policy.training.lora is None:
            return False
        policy = self._spec.policy
        return policy.restore_optimizer != (policy.source == reference.source)

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a split call this rank takes."""
        return self._engine(self._spec.leading).data_parallel_rank

    @dispatch(Dispatch.SPLIT)
    def train(
        self, batch: TokenBatch, loss_fn: LossFn, role: RoleName = POLICY
    ) -> TrainMetrics | PoisonedUpdate:
        """One optimizer step of a role on the whole batch.

        Args:
            batch: with the columns that the loss reads.
            loss_fn: see `LossFn`.
            role: one that has an optimizer.

        Returns:
            Equal on every rank; `PoisonedUpdate` where the loss or the gradient was no finite
            number, and the weights are as before.
        """
        try:
            return self._engine(role).train_batch(batch.widened(), loss_fn)
        except NonFiniteError as error:
            return PoisonedUpdate(str(error))

    @dispatch(Dispatch.RANK_ZERO)
    def performance_metrics(self) -> dict[str, float]:
        """`perf/*` of the leading role's optimizer steps since the last call."""
        return self._engine(self._spec.leading).performance_metrics()

    @dispatch(Dispatch.SPLIT)
    def infer(
        self, batch: TokenBatch, readouts: Readouts = ONLY_LOGPROBS, role: RoleName = POLICY
    ) -> ModelOutputs:
        """What a role says of a batch as it is now, on the CPU."""
        with self._speaking_as(role) as engine:
            return engine.infer_batch(batch.widened(), readouts)

    @dispatch(Dispatch.SPLIT)
    def infer_logprobs(self, batch: TokenBatch, role: RoleName = POLICY) -> Tensor:
        """Logprobs of a role as it is now: (T,) float32 on the CPU."""
        with self._speaking_as(role) as engine:
            return engine.infer_batch(batch.widened()).logprobs_T

    @dispatch(Dispatch.SPLIT_ALL)
    def generate(
        self, requests: Sequence[RolloutRequest], on_completion: Receive | None = None
    ) -> list[list[Completion]]:
        """Sample every request.

        Args:
            requests: with ids that differ.
            on_completion: as in `RolloutService.generate`; a caller in another process has none.

        Returns:
            For each request its completions, in the order of its seeds.

        Raises:
            DeadlineError: the batch was not finished in `rollout.timeout_s`.
            RolloutError: a sample came back twice or not at all.
        """
        return self._served().generate(requests, on_completion)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sync_weights(self, version: int) -> SyncReport:
        """Serve the policy's weights as `version`; verified by digest. Collective."""
        return self._served().sync(self._new_transport, self.send_weights, version)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Have the rollout engine give its memory back, until the next sync."""
        self._served().sleep()

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_weights(self, delivery: Transport | ShardedTransport) -> Receipt:
        """Send the policy's weights to engines elsewhere; returns what was sent. Collective."""
        if not isinstance(delivery, ShardedTransport):
            return delivery.send(iter(self._policy.get_per_tensor_param()))
        if self._send_plan is None:
            self._send_plan = delivery.plan(self._policy.get_per_tensor_param_shard())
        return delivery.send_parts(self._policy.get_per_tensor_param_shard(), self._send_plan)

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
        """Write this rank's shards of every role that trains into `path`. Collective."""
        disk = driver_disk.current()
        own = disk.own(path)
        for directory, engine in self._checkpointed(own):
            directory.mkdir(parents=True, exist_ok=True)
            engine.save_checkpoint(directory, step)
        disk.deliver(own, path)

    @dispatch(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, path: Path, step: int) -> None:
        """Copy this rank's shards and go on; they are written in the background. Collective."""
        writes: list[Callable[[], None]] = []
        disk = driver_disk.current()
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
        """Have the weights of every role become their moving average, where it has one. Collective.

        Returns:
            Whether one had.
        """
        adopted = [engine.adopt_average() for engine in self._engines.values()]
        return any(adopted)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> int:
        """Continue every role that trains from `path`; returns their step. Collective."""
        steps = []
        for directory, engine in self._checkpointed(driver_disk.current().bring(path)):
            steps.append(engine.load_checkpoint(directory, optimizer=True))
            engine.leave_device()
        return steps[0]

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

    def _engine(self, role: RoleName) -> BaseEngine:
        if role not in self._engines:
            raise ValueError(f"this worker was built without a {role} model")
        return self._engines[role]

    @contextmanager
    def _speaking_as(self, role: RoleName) -> Iterator[BaseEngine]:
        """The engine of a role; of a reference that is the policy without its adapter, that."""
        if role == REFERENCE and self._adapter_off_is_reference:
            with self._policy.disable_adapter():
                yield self._policy
        else:
            yield self._engine(role)

    def _checkpointed(self, path: Path) -> Iterator[tuple[Path, BaseEngine]]:
        """Where each role that trains is kept, and its engine; the policy first."""
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


def _brought(spec: WorkerSpec) -> WorkerSpec:
    """What a rank builds, from files that it can read."""
    bring = driver_disk.current().bring

    def here(role: RoleSpec) -> RoleSpec:
        given = role.source
        checkpoint = given.checkpoint_dir and bring(given.checkpoint_dir)
        return replace(role, source=ModelSource(bring(given.hf_dir), checkpoint))

    roles = {name: here(role) for name, role in spec.roles.items()}
    return replace(spec, roles=roles, serving_dir=bring(spec.serving_dir))


def _load(engine: BaseEngine, role: RoleSpec) -> None:
    """Build an engine's model and fill it from the directory or the checkpoint."""
    source = role.source
    engine.initialize(load_weights=source.checkpoint_dir is None)
    if source.checkpoint_dir is not None:
        engine.load_checkpoint(source.checkpoint_dir, optimizer=role.restore_optimizer)
    engine.leave_device()
