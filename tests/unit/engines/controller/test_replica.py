"""Rollout engines in processes of their own, beside the ranks; on a real embedded cluster."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

from engines.algorithms.supervised import SupervisedLoss
from engines.config.rollout import RolloutConfig
from engines.controller import launch
from engines.controller.launch import launch_policy_beside, policy_replica, reserve_replicas
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.placement import Queueing, reserve
from engines.controller.replica import RayReplicas, RemoteReplica, ReplicaSpec
from engines.controller.rollout import FrozenModel, Rollout, ServedRollout, replica_beside
from engines.controller.worker_group import WorkerGroup
from engines.errors import ReplicaLostError, WeightSyncError
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.replica_pool import ReplicaState
from engines.rollout.service import RolloutService
from engines.training.spec import POLICY
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from engines.weight_sync.shared_memory import PREFIX, SHARED_MEMORY
from infra.errors import ConfigError, DeadlineError
from infra.host.processes import is_alive
from infra.job_environments import installed_distributions
from infra.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.exclusive, pytest.mark.usefixtures("cluster")]

REQUESTS = [
    RolloutRequest(f"p{i}", tuple(range(4, 7 + i)), SamplingParams(12), (i, i + 50, i + 100))
    for i in range(5)
]
IDS = [[(7 * i + t) % 13 + 4 for t in range(5 + i % 4)] for i in range(9)]
BATCH = TokenBatch.from_sequences(IDS, loss_mask=[[0, 0, *[1] * (len(x) - 2)] for x in IDS])


@contextmanager
def launched(
    spec: WorkerSpec, log_dir: Path, **rollout: Any
) -> Iterator[tuple[WorkerGroup, Rollout]]:
    log_dir.mkdir()
    spec = replace(spec, rollout=RolloutConfig(timeout_s=60.0, **rollout))
    with ExitStack() as stack:
        workers, engines, _ = launch_policy_beside(spec, {}, log_dir)
        stack.enter_context(closing(workers))
        stack.enter_context(closing(engines))
        yield workers, engines


def two_versions(workers: WorkerGroup, rollout: Rollout) -> list[Any]:
    """What comes of a sync, samples, a step, another sync and samples."""
    found: list[Any] = []
    for version in (0, 7):
        found.append(rollout.publish(version))
        found.append(rollout.generate(REQUESTS))
        rollout.sleep()
        found.append(workers.run(ModelWorker.train, BATCH, SupervisedLoss()).loss)
    return found


def drawn(found: list[Any]) -> list[Any]:
    """The tokens of what `two_versions` sampled."""
    return [[[c.token_ids.tolist() for c in row] for row in rows] for rows in (found[1], found[4])]


def test_engines_beside_the_ranks_sample_what_those_inside_do(
    policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    with launched(policy_spec, tmp_path / "inside") as (workers, rollout):
        expected = two_versions(workers, rollout)
    assert expected[1] != expected[4]
    with launched(policy_spec, tmp_path / "one", placement="disaggregated") as parts:
        assert two_versions(*parts) == expected
    several = {"placement": "disaggregated", "num_replicas": 2}
    with launched(policy_spec, tmp_path / "two", **several) as (workers, rollout):
        found = two_versions(workers, rollout)
        assert isinstance(rollout, ServedRollout)
        assert [health.version for health in rollout.health()] == [7, 7]  # devices of their own
    # Another batch rounds differently, by far less than what a draw notices here.
    assert (found[0], found[3]) == (expected[0], expected[3])
    tokens = [
        [[c.token_ids.tolist() for c in row] for row in rows] for rows in (found[4], expected[4])
    ]
    assert tokens[0] == tokens[1]
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}*-{os.getpid()}-*")), (
        "its one rank is this process"
    )


def test_ranks_that_are_actors_send_to_replicas(policy_spec: WorkerSpec, tmp_path: Path) -> None:
    with launched(policy_spec, tmp_path / "inside") as (workers, rollout):
        expected = two_versions(workers, rollout)
    training = policy_spec.training.model_copy(update={"num_workers": 2})
    spec = replace(policy_spec, roles={POLICY: replace(policy_spec.policy, training=training)})
    with launched(spec, tmp_path / "beside", placement="disaggregated") as parts:
        found = two_versions(*parts)
    assert found[:2] == expected[:2]
    assert found[2] == pytest.approx(expected[2], abs=1e-5)


def test_weights_that_are_broadcast_are_those_of_shared_memory(
    policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    with launched(policy_spec, tmp_path / "inside") as (workers, rollout):
        expected = two_versions(workers, rollout)
    training = policy_spec.training.model_copy(update={"num_workers": 2})
    options = {"placement": "disaggregated", "transport": "collective", "num_replicas": 2}
    with launched(
        replace(policy_spec, roles={POLICY: replace(policy_spec.policy, training=training)}),
        tmp_path / "beside",
        **options,
        delta_sync=True,
    ) as parts:
        found = two_versions(*parts)
    assert found[0] == expected[0]
    with launched(policy_spec, tmp_path / "here", **{**options, "num_replicas": 1}) as parts:
        assert two_versions(*parts) == expected


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own engine as one that needs processes of its own, which starts in seconds."""
    monkeypatch.setattr(launch, "is_embedded", lambda rollout: False)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_replicas_sharing_rank_devices_sleep_during_training(
    policy_spec: WorkerSpec, tmp_path: Path, num_workers: int, request: pytest.FixtureRequest
) -> None:
    import ray  # not before the cluster is there: it keeps what it finds of a token

    training = policy_spec.training.model_copy(update={"num_workers": num_workers})
    spec = replace(policy_spec, roles={POLICY: replace(policy_spec.policy, training=training)})
    with launched(spec, tmp_path / "inside") as (workers, rollout):
        expected = two_versions(workers, rollout)
    request.getfixturevalue("in_processes")
    with launched(spec, tmp_path / "shared") as (workers, rollout):
        assert isinstance(rollout, ServedRollout)
        assert len(replica_processes(rollout)) == num_workers
        # One place holds a rank and its replica: nobody else's share of the cluster is taken.
        free = ray.available_resources().get("CPU", 0.0)
        assert ray.cluster_resources()["CPU"] - free == pytest.approx(num_workers)
        assert [health.can_serve for health in rollout.health()] == [False] * num_workers
        found = two_versions(workers, rollout)
        assert [health.version for health in rollout.health()] == [-1] * num_workers
        rollout.sleep()
        victim = replica_processes(rollout)[0]
        victim.kill()
        victim.wait(60)
        # Found when it is woken, and replaced then.
        rollout.publish(8)
        assert len(rollout.generate(REQUESTS)) == len(REQUESTS)
        assert rollout.num_restarts == 1
    assert found[0] == expected[0]
    # Two ranks share the requests out in another way, and so round in another way.
    assert drawn(found) == drawn(expected)
    assert found == expected or num_workers > 1


def test_replica_lost_in_sampling_is_up_and_asleep_for_training(
    policy_spec: WorkerSpec, tmp_path: Path, in_processes: None
) -> None:
    with launched(policy_spec, tmp_path / "log") as (_, rollout):
        assert isinstance(rollout, ServedRollout)
        rollout.publish(0)
        replica_processes(rollout)[0].kill()
        rollout.sleep()
        assert rollout.states() == [ReplicaState.STALE]
        assert rollout.num_restarts == 1
        assert [health.can_serve for health in rollout.health()] == [False]


def test_an_engine_that_refuses_its_options_says_so(
    policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    options = {"max_prefill_tokens": 0}
    with (
        pytest.raises(ConfigError, match="rollout.options.max_prefill_tokens"),
        launched(policy_spec, tmp_path / "log", placement="disaggregated", options=options),
    ):
        pass


def test_replica_with_unplanned_library_versions_does_not_start(
    policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    """It looks at its own environment, which may be another one on its machine."""
    interpreter = Path(sys.executable)
    spec = ReplicaSpec(
        serving_dir=policy_spec.serving_dir,
        rollout=RolloutConfig(placement="disaggregated"),
        dtype="float32",
        platform="cpu",
        device_kind=None,
        num_threads=1,
        log_dir=tmp_path,
        interpreter=interpreter,
        libraries={**installed_distributions(interpreter), "torch": "1.0"},
    )
    with (
        closing(reserve_replicas([spec])) as pool,
        pytest.raises(ConfigError, match=r"a replica of transformers .* torch 2.* for 1\.0"),
    ):
        RayReplicas(spec, pool.places(0, 1)).start()


def replica_processes(rollout: Rollout) -> list[psutil.Process]:
    """Of these replicas alone: other clusters of the machine have theirs."""
    assert isinstance(rollout, ServedRollout)
    return processes_of(rollout)


def processes_of(service: RolloutService) -> list[psutil.Process]:
    """Of the replicas that live: nobody hears of a death before a replica is asked again."""
    remote = [cast(RemoteReplica, slot.engine) for slot in service._pool.slots]
    pids = [one._location.process.pid for one in remote if one._location]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_a_replica_that_dies_is_named(policy_spec: WorkerSpec, tmp_path: Path) -> None:
    options = {"placement": "disaggregated", "max_num_restarts": 0}
    with launched(policy_spec, tmp_path / "log", **options) as (_, rollout):
        rollout.publish(0)
        (replica,) = replica_processes(rollout)
        replica.kill()
        with pytest.raises(ReplicaLostError, match="replica 0: its process died") as caught:
            rollout.generate(REQUESTS)
        assert "rollout.max_num_restarts: 0 are used up" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [TimeoutError(), DeadlineError("it to abort", 20.0)])
def test_replica_not_closing_by_a_deadline_is_killed_quietly(
    tmp_path: Path, error: Exception
) -> None:
    killed: list[int] = []

    class Silent(RemoteReplica):
        async def _call(self, name: str, *arguments: Any) -> Any:
            raise error

        def kill(self) -> None:
            killed.append(0)

    asyncio.run(Silent(None, 0, tmp_path / "replica-0.log").close())
    assert killed == [0]


def test_second_model_beside_policy_answers_from_own_processes(
    policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    """Both have their places at once; one that dies is replaced, and says the same."""
    rollout_config = RolloutConfig(placement="disaggregated", timeout_s=60.0)
    spec, directory = replace(policy_spec, rollout=rollout_config), policy_spec.serving_dir
    like = policy_replica(spec, rollout_config, tmp_path)
    asked = [PromptRequest(f"r{at}", tuple(ids), 2, 0.7, 4) for at, ids in enumerate(IDS)]
    alone = FrozenModel(replica_beside(like, directory, 1, {}, embedded=True), directory)
    with alone.served_by(launch.launch_engines(alone.replica)) as service:
        expected = service.prompt_logprobs(asked)
    beside = replica_beside(like, directory, 2, {}, embedded=False)
    beside = replace(beside, log_dir=tmp_path / "teacher")
    for place in ("policy", "teacher"):
        (tmp_path / place).mkdir()
    with ExitStack() as stack:
        workers, rollout, launched = launch.launch_policy_beside(
            spec, {"teacher": beside}, tmp_path / "policy"
        )
        stack.enter_context(closing(workers))
        stack.enter_context(closing(rollout))
        model = FrozenModel(beside, directory)
        service = stack.enter_context(model.served_by(launched["teacher"]))
        victims: set[int] = set()
        for _ in range(3):
            found = service.prompt_logprobs(asked)
            for said, other in zip(found, expected, strict=True):
                torch.testing.assert_close(said.logprobs_N, other.logprobs_N, rtol=0, atol=1e-5)
                assert said.topk_ids_NK is not None
                assert other.topk_ids_NK is not None
                assert torch.equal(said.topk_ids_NK, other.topk_ids_NK)
            victim = processes_of(service)[0]
            victims.add(victim.pid)
            victim.kill()
            victim.wait(60)
        assert len(victims) == 3, "of two replicas: one of them had been replaced"
        rollout.publish(0)
        assert len(rollout.generate(REQUESTS)) == len(REQUESTS)


def test_policy_start_failure_ends_the_models_beside_it(
    policy_spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RemoteReplica] = []
    start = RayReplicas.start

    def noted(replicas: RayReplicas) -> list[RemoteReplica]:
        started.extend(found := start(replicas))
        return found

    monkeypatch.setattr(RayReplicas, "start", noted)
    rollout, directory = RolloutConfig(placement="disaggregated"), policy_spec.serving_dir
    like = policy_replica(policy_spec, rollout, tmp_path)
    beside = replace(replica_beside(like, directory, 1, {}, embedded=False), log_dir=tmp_path)
    refused = rollout.model_copy(update={"options": {"max_prefil_tokens": 5}})
    spec = replace(policy_spec, rollout=refused)
    with pytest.raises(ConfigError, match="max_prefil_tokens"):
        launch.launch_policy_beside(spec, {"teacher": beside}, tmp_path)
    [teacher] = started
    assert teacher._location is not None
    process = teacher._location.process
    wait_for(lambda: not is_alive(process), "the teacher to end", 30.0)
    # All of the four CPUs can be had again.
    with closing(reserve([{"num_cpus": 1}] * 4, Queueing(deadline_s=240.0))):
        pass


PROMPT = tuple(range(4, 10))
LONG = [
    RolloutRequest(f"long{i}", PROMPT, SamplingParams(24), tuple(range(9 * i, 9 * i + 9)))
    for i in range(400)
]


def strike(victim: psutil.Process, signal_name: str) -> None:
    """In the middle of the batch, as the processor time of the victim says."""
    began_s, end = sum(victim.cpu_times()[:2]), time.monotonic() + 60
    while sum(victim.cpu_times()[:2]) < began_s + 0.05:
        assert time.monotonic() < end
        time.sleep(0.002)
    victim.send_signal(getattr(signal, signal_name))


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_fault_row_5_a_replica_lost_while_it_samples_is_replaced(
    policy_spec: WorkerSpec, tmp_path: Path, signal_name: str
) -> None:
    """Its share is sampled again from the same weights: bitwise the same batch comes of it."""
    options = {"placement": "disaggregated", "num_replicas": 2, "silence_s": 15.0}
    with launched(policy_spec, tmp_path / "whole", **options) as (_, rollout):
        rollout.publish(3)
        expected = rollout.generate(LONG)
    with launched(policy_spec, tmp_path / "lost", **options) as (workers, rollout):
        assert isinstance(rollout, ServedRollout)
        rollout.publish(3)
        victim = replica_processes(rollout)[0]
        at_work = threading.Thread(target=strike, args=(victim, signal_name))
        at_work.start()
        assert rollout.generate(LONG) == expected
        at_work.join()
        assert rollout.num_restarts == 1
        assert not victim.is_running()
        # The one in its place gets the weights of the time when it is up, and serves them.
        workers.run(ModelWorker.train, BATCH, SupervisedLoss())
        rollout.publish(4)
        end = time.monotonic() + 120
        while rollout.states() != [ReplicaState.HEALTHY] * 2:
            assert time.monotonic() < end, rollout.states()
            rollout.generate(REQUESTS)
        assert [health.version for health in rollout.health()] == [4, 4]


def test_a_replica_that_comes_late_gets_no_other_weights(
    policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    """The trainer went on: what it holds now is not what was published."""
    with launched(policy_spec, tmp_path / "log", placement="disaggregated") as (workers, rollout):
        rollout.publish(0)
        workers.run(ModelWorker.train, BATCH, SupervisedLoss())
        replica_processes(rollout)[0].kill()
        with pytest.raises(WeightSyncError, match="version 0 was published as"):
            rollout.generate(REQUESTS)


def test_all_replicas_lost_before_a_sync_are_replaced_by_it(
    policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    with launched(policy_spec, tmp_path / "log", placement="disaggregated") as (_, rollout):
        rollout.publish(0)
        expected = rollout.generate(REQUESTS)
        replica_processes(rollout)[0].kill()
        rollout.publish(0)
        assert rollout.generate(REQUESTS) == expected
