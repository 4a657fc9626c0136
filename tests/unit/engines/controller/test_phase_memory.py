"""The order in which a trainer and engines on its device take and give back memory."""

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.algorithms.supervised import SupervisedLoss
from engines.config.rollout import RolloutConfig
from engines.controller import launch, model_worker
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.placement import Pool
from engines.controller.ray_group import RayGroupOptions
from engines.controller.rollout import LaunchedEngines, RankRollout, ServedRollout
from engines.controller.worker_group import InProcessGroup
from engines.rollout.base import ALL_MEMORY, MemoryTag
from engines.rollout.transformers.engine import TransformersEngine
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.spec import POLICY
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from engines.weight_sync.in_process import new_transport
from hardware.cpu import CPUPlatform

BATCH = TokenBatch.from_sequences([[5, 6, 7, 8]], loss_mask=[[0, 1, 1, 1]])
REQUESTS = [RolloutRequest("p", (4, 5, 6), SamplingParams(6), (1, 2))]


class CountingPlatform(CPUPlatform):
    """The CPU, which records when memory is given back."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def empty_cache(self) -> None:
        self.calls.append("empty")


class TaggedEngine(TransformersEngine):
    """Records what it is asked in order; wakes by tags."""

    calls: list[str]

    async def update_weights(self, source: Any, version: int):
        self.calls.append("update")
        return await super().update_weights(source, version)

    async def finish_update(self, version: int, digest: str) -> None:
        self.calls.append("serve")
        await super().finish_update(version, digest)

    async def sleep(self, level: Any = "weights") -> None:
        self.calls.append("sleep")
        await super().sleep(level)

    async def wake_up(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        self.calls.append(f"wake {' '.join(tags)}")
        await super().wake_up(tags)


class UntaggedEngine(TaggedEngine):
    """An engine of the contract before tags."""

    async def wake_up(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await super().wake_up(ALL_MEMORY)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    platform = CountingPlatform(found)
    monkeypatch.setattr(model_worker, "detect", lambda name: (platform, ""))
    move = FSDP2Engine.to

    def recorded(engine: FSDP2Engine, device: Any, **parts: bool) -> None:
        if parts.get("model", True):
            found.append(f"trainer {'off' if isinstance(device, str) else 'on'}")
        move(engine, device, **parts)

    monkeypatch.setattr(FSDP2Engine, "to", recorded)
    return found


@contextmanager
def beside(
    spec: WorkerSpec, kind: type[TaggedEngine], calls: list[str], *, shares_devices: bool = True
) -> Iterator[tuple[ModelWorker, ServedRollout]]:
    training = spec.training.model_copy(update={"param_offload": True, "optimizer_offload": True})
    policy = replace(spec.policy, training=training)
    trainer = ModelWorker(replace(spec, rollout=None, roles={POLICY: policy}))
    trainer.initialize()
    engine = kind(spec.serving_dir, RolloutConfig(), "float32", CountingPlatform(calls))
    engine.calls = calls
    transport = new_transport(spec.serving_dir, "float32", 30.0)
    launched = LaunchedEngines([engine], 30.0, transport, shares_devices)
    with closing(InProcessGroup(trainer)) as group, closing(ServedRollout(launched, group)) as made:
        yield trainer, made


def test_the_trainer_leaves_before_the_cache_is_taken(
    policy_spec: WorkerSpec, calls: list[str]
) -> None:
    with beside(policy_spec, TaggedEngine, calls) as (trainer, rollout):
        rollout.publish(0)
        expected = rollout.generate(REQUESTS)[0][0].logprobs.tolist()
        rollout.sleep()
        calls.clear()
        rollout.publish(1)
        at = calls.index("update")
        assert "wake weights" in calls[:at], "which takes the tensors"
        assert "wake cache" in calls[at:]
        # The update begins beside the trainer's thread.
        assert calls[:at] + calls[at + 1 :] == [
            "trainer off", "empty", "wake weights", "trainer on", "trainer off",
            "trainer off", "empty", "wake cache", "serve",
        ]  # fmt: skip
        assert rollout.generate(REQUESTS)[0][0].logprobs.tolist() == expected
        calls.clear()
        rollout.sleep()
        assert calls == ["sleep", "empty"]
        calls.clear()
        trainer.train(BATCH, SupervisedLoss())
        trainer.infer(BATCH)
        assert "empty" not in calls, "the next pass takes the memory again"


def test_an_engine_without_tags_wakes_once_for_weights(
    policy_spec: WorkerSpec, calls: list[str]
) -> None:
    with beside(policy_spec, UntaggedEngine, calls) as (_, rollout):
        rollout.publish(0)
        rollout.sleep()
        calls.clear()
        rollout.publish(1)
        assert [each for each in calls if each.startswith("wake")] == ["wake weights cache"]
        assert calls.index("wake weights cache") < calls.index("update")
        assert len(rollout.generate(REQUESTS)[0]) == 2


def test_engines_elsewhere_leave_the_trainers_memory_alone(
    policy_spec: WorkerSpec, calls: list[str]
) -> None:
    with beside(policy_spec, TaggedEngine, calls, shares_devices=False) as (_, rollout):
        calls.clear()
        rollout.publish(0)
        assert "empty" not in calls


def test_an_engine_inside_the_rank_gets_the_memory_too(
    policy_spec: WorkerSpec, calls: list[str]
) -> None:
    trainer = ModelWorker(policy_spec)
    trainer.initialize()
    with closing(InProcessGroup(trainer)) as group:
        rollout = RankRollout(group)
        rollout.publish(0)
        rollout.generate(REQUESTS)
        calls.clear()
        rollout.sleep()
        trainer.train(BATCH, SupervisedLoss())
        assert calls == ["empty"]
        rollout.publish(1)
        assert calls == ["empty"] * 3


def test_actors_get_the_variables_of_the_backend(
    policy_spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chip(CPUPlatform):
        def training_env_vars(self, library: str) -> dict[str, str]:
            return {"CHIP_LIBRARY": library, "CHIP_MEMORY": "grows"}

    started: list[RayGroupOptions] = []
    monkeypatch.setattr(launch, "planned", lambda name: Chip())
    monkeypatch.setattr(
        launch, "RayWorkerGroup", lambda make, options, pool: started.append(options)
    )
    monkeypatch.setenv("CHIP_MEMORY", "as the user says")
    launch._group_of_actors(policy_spec, tmp_path, Pool(None, ()))
    assert started[0].env_vars == {"CHIP_LIBRARY": "fsdp2"}
