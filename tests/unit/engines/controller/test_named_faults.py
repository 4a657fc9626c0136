"""Faults of weight sync that others had, put in one by one: each is found before a token is used.

The trainer, the service, the engine and the probe are the real ones. A fault takes the place of a
few lines of one of them, between two versions of the weights.
`docs/concepts/weight-faults.md` is the table of all of them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.algorithms.supervised import SupervisedLoss
from engines.checksum import combine, tensor_checksum
from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig, TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.rollout import LaunchedEngines, ServedRollout
from engines.controller.worker_group import InProcessGroup
from engines.errors import ReplicaLostError, RolloutError, WeightSyncError
from engines.rollout.base import RolloutEngine
from engines.rollout.replica_pool import RestartPolicy
from engines.rollout.transformers.engine import TransformersEngine
from engines.trainers.mismatch import MismatchGate, WeightProbe, probe_prompt
from engines.training.spec import POLICY
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from engines.weight_sync.base import WeightDigest
from engines.weight_sync.in_process import InProcessTransport, new_transport
from hardware.cpu import CPUPlatform

ROOT = Path(__file__).resolve().parents[4]
TABLE = ROOT / "docs/concepts/weight-faults.md"
NAME = "model.layers.1.mlp.up_proj.weight"
IDS = [[(7 * i + t) % 13 + 4 for t in range(5 + i % 4)] for i in range(9)]
BATCH = TokenBatch.from_sequences(IDS, loss_mask=[[0, 0, *[1] * (len(x) - 2)] for x in IDS])
REQUESTS = [
    RolloutRequest(f"p{i}", tuple(range(4, 7 + i)), SamplingParams(12), (i, i + 50))
    for i in range(4)
]
Named = Iterable[tuple[str, Tensor]]


class Spares:
    """Starts the engines that it is given."""

    def __init__(self) -> None:
        self.engines: list[RolloutEngine] = []

    async def restart(self, place: int, lost: RolloutEngine) -> RolloutEngine:
        return self.engines.pop(0)


@dataclass
class Rig:
    """A trainer whose first weights are served, and which has other ones by now.

    Attributes:
        trainer: real.
        engine: that serves them.
        rollout: the service over it.
        probe: as in the RL loop.
        first: the weights that are served.
        spares: what starts in the place of a lost replica.
        asked: names of the requests that the engine was given since.
    """

    trainer: ModelWorker
    engine: TransformersEngine
    rollout: ServedRollout
    probe: WeightProbe
    first: dict[str, Tensor]
    spares: Spares
    asked: list[str] = field(default_factory=list)

    def publish(self, version: int) -> WeightDigest:
        return self.rollout.publish(version, self.probe).sent


def engine_of(spec: WorkerSpec, dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(spec.serving_dir, RolloutConfig(), dtype, CPUPlatform())


@contextmanager
def rig_of(spec: WorkerSpec) -> Iterator[Rig]:
    spec = replace(spec, rollout=None)
    trainer, engine, spares = ModelWorker(spec), engine_of(spec), Spares()
    trainer.initialize()
    launched = LaunchedEngines(
        [engine],
        30.0,
        new_transport(spec.serving_dir, "float32", 30.0),
        shares_devices=False,
        restarts=RestartPolicy(spares.restart, 2, 5.0),
    )
    group = InProcessGroup(trainer)
    with closing(group), closing(ServedRollout(launched, group)) as rollout:
        gate = MismatchGate(1e-4, 1e-2)
        prompt = probe_prompt(spec.serving_dir, 32)
        probe = WeightProbe(prompt, 1.0, gate, trainer.infer_logprobs)
        first = {name: t.clone() for name, t in trainer._policy.get_per_tensor_param()}
        rig = Rig(trainer, engine, rollout, probe, first, spares)
        rig.publish(0)
        for _ in range(3):
            trainer.train(BATCH, SupervisedLoss())
        generate = engine.generate

        def spy(requests):
            rig.asked += [request.request_id for request in requests]
            return generate(requests)

        engine.generate = spy
        yield rig


@pytest.fixture
def rig(policy_spec: WorkerSpec) -> Iterator[Rig]:
    with rig_of(policy_spec) as made:
        yield made


@pytest.fixture
def lora(policy_spec: WorkerSpec) -> Iterator[Rig]:
    training = TrainingConfig(num_threads=1, lora=LoraConfig(rank=4))
    with rig_of(
        replace(policy_spec, roles={POLICY: replace(policy_spec.policy, training=training)})
    ) as made:
        yield made


def sends(rig: Rig, patch: pytest.MonkeyPatch, tensors: Callable[[], Named]) -> None:
    """What the trainer sends instead."""

    def send(_: ModelWorker, transport: InProcessTransport) -> WeightDigest:
        return transport.send(iter(tensors()))

    send.__dict__.update(ModelWorker.send_weights.__dict__)
    patch.setattr(ModelWorker, "send_weights", send)


def arrives(rig: Rig, patch: pytest.MonkeyPatch, spoil: Callable[[Named], Named]) -> None:
    """What becomes of the weights between the two."""
    take: Any = rig.engine.update_weights

    class Spoilt:
        checksum_method = "xxh3"

        def __init__(self, source) -> None:
            self.source = source

        def tensors(self) -> Named:
            return spoil(self.source.tensors())

    patch.setattr(rig.engine, "update_weights", lambda source, v: take(Spoilt(source), v))


def adapter_stays_behind(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """verl#7495: each push is the initial model, whatever was trained."""
    sends(rig, patch, rig.first.items)


def adapter_goes_by_its_own_names(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """OpenRLHF#1349: tensors of the adapter, which no parameter of the engine is called like."""
    names = f"base_model.model.{NAME}".replace(".weight", ".lora_A.weight")
    sends(rig, patch, lambda: [*rig.first.items(), (names, torch.zeros(4, 32))])


def wakes_up_as_it_was(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """trl#5312: what was synced into a sleeping engine is overwritten when it wakes up."""
    finish = rig.engine.finish_update

    async def roll_back(version: int, digest: str) -> None:
        await finish(version, digest)
        rig.engine._model.load(iter(rig.first.items()))

    patch.setattr(rig.engine, "finish_update", roll_back)


def a_bit_flips(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    def flip(tensors: Named) -> Named:
        for name, tensor in tensors:
            if name == NAME:
                tensor = tensor.clone()
                tensor.view(torch.int32)[3, 5] ^= 1
            yield name, tensor

    arrives(rig, patch, flip)


def without(tensors: Named) -> Named:
    return ((name, tensor) for name, tensor in tensors if name != NAME)


def a_tensor_is_dropped_on_the_way(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    arrives(rig, patch, without)


def a_tensor_is_not_sent(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    sends(rig, patch, lambda: without(rig.trainer._policy.get_per_tensor_param()))


def a_replica_skips_the_sync(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """It reads the weights to their end, says what it should, and goes on with those it had."""

    async def skip(source, version: int) -> WeightDigest:
        held = [(name, tensor_checksum(tensor), tensor.nbytes) for name, tensor in source.tensors()]
        digest = combine((name, checksum) for name, checksum, _ in held)
        rig.engine._version, rig.engine._pending = -1, (version, digest)
        return WeightDigest(digest, len(held), sum(num_bytes for *_, num_bytes in held))

    patch.setattr(rig.engine, "update_weights", skip)


PROBE = "probe/version=1/replica=0: after the sync"


def found(rig: Rig, fault: Callable, what: str) -> None:
    """A fault is found, no request but the probe was sampled, and none will be."""
    with pytest.MonkeyPatch.context() as patch:
        fault(rig, patch)
        with pytest.raises(WeightSyncError, match=what):
            rig.publish(1)
        with pytest.raises(RolloutError, match="no confirmed weights"):
            rig.rollout.generate(REQUESTS)
    assert {name for name in rig.asked if not name.startswith("probe/")} == set()
    rig.publish(2)
    assert rig.rollout.generate(REQUESTS)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (adapter_stays_behind, PROBE),
        (adapter_goes_by_its_own_names, "has no parameter base_model.model.*lora_A"),
        (wakes_up_as_it_was, PROBE),
    ],
)
def test_with_an_adapter(lora: Rig, fault: Callable, what: str) -> None:
    found(lora, fault, what)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (wakes_up_as_it_was, PROBE),
        (a_bit_flips, "version 1: sent .* replica 0 holds"),
        (a_tensor_is_dropped_on_the_way, f"1 parameters were not sent, first {NAME}"),
        (a_tensor_is_not_sent, f"1 parameters were not sent, first {NAME}"),
        (a_replica_skips_the_sync, PROBE),
    ],
)
def test_with_whole_weights(rig: Rig, fault: Callable, what: str) -> None:
    found(rig, fault, what)


def test_an_adapter_is_served_merged(lora: Rig) -> None:
    """What verl#7495 and OpenRLHF#1349 asked for."""
    before = lora.rollout.generate(REQUESTS)
    lora.publish(1)
    assert lora.rollout.generate(REQUESTS) != before


def test_an_adapter_in_another_dtype_is_cast_or_refused(lora: Rig, policy_spec: WorkerSpec) -> None:
    """OpenRLHF#1349's first layer: an adapter in float32 for an engine in bfloat16."""
    from rlhf.testing.rollout_calls import send_weights

    engine = engine_of(policy_spec, "bfloat16")
    with pytest.raises(WeightSyncError, match="its rollout dtype is torch.bfloat16"):
        send_weights(engine, lora.trainer._policy.get_per_tensor_param(), 1)
    send_weights(engine, lora.trainer._policy.get_per_tensor_param(), 2, "bfloat16")
    assert engine.version == 2


def test_who_slept_asks_for_its_weights_again(rig: Rig) -> None:
    """trl#5312's other half: waking up alone does not bring them back."""
    rig.publish(1)
    expected = rig.rollout.generate(REQUESTS)
    rig.rollout._on_each(lambda engine: engine.sleep("weights"), "to sleep")
    rig.rollout._on_each(lambda engine: engine.wake_up(), "to wake up")
    with pytest.raises(RolloutError, match="no confirmed weights"):
        rig.rollout.generate(REQUESTS)
    rig.publish(1)
    assert rig.rollout.generate(REQUESTS) == expected


def dies(engine: TransformersEngine, patch: pytest.MonkeyPatch) -> None:
    async def generate(_):
        raise ReplicaLostError("replica 0: its process died")
        yield

    patch.setattr(engine, "generate", generate)


def old_one(rig: Rig, spec: WorkerSpec) -> TransformersEngine:
    """A replica that came up with the weights of its first life, and would serve them at once."""
    from rlhf.testing.rollout_calls import send_weights

    engine = engine_of(spec)
    send_weights(engine, rig.first.items(), 0)
    return engine


def test_replica_returning_with_old_weights_gets_new_ones(
    rig: Rig, policy_spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rig.rollout.generate(REQUESTS)
    rig.publish(1)
    expected = rig.rollout.generate(REQUESTS)
    rig.spares.engines = [old_one(rig, policy_spec)]
    dies(rig.engine, monkeypatch)
    assert rig.rollout.generate(REQUESTS) == expected != before
    assert rig.rollout.num_restarts == 1


def test_replica_keeping_old_weights_after_restart_is_not_used(
    rig: Rig, policy_spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.publish(1)
    spare = old_one(rig, policy_spec)
    lost, rig.engine = rig.engine, spare
    a_replica_skips_the_sync(rig, monkeypatch)
    rig.spares.engines = [spare]
    dies(lost, monkeypatch)
    with pytest.raises(WeightSyncError, match=PROBE):
        rig.rollout.generate(REQUESTS)
    assert {name for name in rig.asked if not name.startswith("probe/")} == set()


def test_the_table_names_tests_that_exist() -> None:
    """A fault whose test was renamed would look proven and be none."""
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", TABLE.read_text("utf-8"))
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text("utf-8"), f"{file}::{test}"
