"""Rollout engines in processes of their own, beside the ranks; on a real embedded cluster."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.algorithms.supervised import sft_loss_fn
from engines.config.rollout import RolloutConfig
from engines.controller.launch import launch_policy_with_rollout, reserve_replicas
from engines.controller.policy_worker import PolicySpec, PolicyWorker
from engines.controller.replica import ReplicaSpec
from engines.controller.replica_start import RayReplicas
from engines.controller.rollout import Rollout, ServedRollout
from engines.controller.worker_group import WorkerGroup
from engines.errors import ReplicaLostError, WeightSyncError
from engines.rollout.replica_state import ReplicaState
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from engines.weight_sync.shared_memory import PREFIX, SHARED_MEMORY
from infra.errors import ConfigError
from infra.job_environments import installed_distributions

pytestmark = [pytest.mark.slow, pytest.mark.exclusive, pytest.mark.usefixtures("cluster")]

REQUESTS = [
    RolloutRequest(f"p{i}", tuple(range(4, 7 + i)), SamplingParams(12), (i, i + 50, i + 100))
    for i in range(5)
]
IDS = [[(7 * i + t) % 13 + 4 for t in range(5 + i % 4)] for i in range(9)]
BATCH = TokenBatch.from_sequences(IDS, loss_mask=[[0, 0, *[1] * (len(x) - 2)] for x in IDS])


@contextmanager
def launched(
    spec: PolicySpec, log_dir: Path, **rollout: Any
) -> Iterator[tuple[WorkerGroup, Rollout]]:
    log_dir.mkdir()
    spec = replace(spec, rollout=RolloutConfig(timeout_s=60.0, **rollout))
    with ExitStack() as stack:
        workers, engines = launch_policy_with_rollout(spec, log_dir)
        stack.enter_context(closing(workers))
        stack.enter_context(closing(engines))
        yield workers, engines


def two_versions(workers: WorkerGroup, rollout: Rollout) -> list[Any]:
    """What comes of a sync, samples, a step, another sync and samples."""
    found: list[Any] = []
    for version in (0, 7):
        found.append(rollout.publish(version))
        found.append(rollout.generate(REQUESTS))
        found.append(workers.run(PolicyWorker.train_mini_batch, BATCH, sft_loss_fn()).loss)
    return found


def test_engines_beside_the_ranks_sample_what_those_inside_do(
    policy_spec: PolicySpec, tmp_path: Path
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
        assert [health.version for health in rollout.health()] == [7, 7]
    # Another batch rounds differently, by far less than what a draw notices here.
    assert (found[0], found[3]) == (expected[0], expected[3])
    tokens = [[[c.token_ids for c in row] for row in rows] for rows in (found[4], expected[4])]
    assert tokens[0] == tokens[1]
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}*-{os.getpid()}-*"))


def test_ranks_that_are_actors_send_to_replicas(policy_spec: PolicySpec, tmp_path: Path) -> None:
    with launched(policy_spec, tmp_path / "inside") as (workers, rollout):
        expected = two_versions(workers, rollout)
    training = policy_spec.training.model_copy(update={"num_workers": 2})
    spec = replace(policy_spec, training=training)
    with launched(spec, tmp_path / "beside", placement="disaggregated") as parts:
        found = two_versions(*parts)
    assert found[:2] == expected[:2]
    assert found[2] == pytest.approx(expected[2], abs=1e-5)


def test_an_engine_that_refuses_its_options_says_so(
    policy_spec: PolicySpec, tmp_path: Path
) -> None:
    options = {"max_prefill_tokens": 0}
    with (
        pytest.raises(ConfigError, match="rollout.options.max_prefill_tokens"),
        launched(policy_spec, tmp_path / "log", placement="disaggregated", options=options),
    ):
        pass


def test_a_replica_beside_other_libraries_than_planned_does_not_start(
    policy_spec: PolicySpec, tmp_path: Path
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
        closing(reserve_replicas(spec)) as pool,
        pytest.raises(ConfigError, match=r"a replica of transformers .* torch 2.* for 1\.0"),
    ):
        RayReplicas(spec, pool.places(0, 1)).start()


def replica_processes() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "ray::ReplicaProcess" in " ".join(process.info["cmdline"] or [])
    ]


def test_a_replica_that_dies_is_named(policy_spec: PolicySpec, tmp_path: Path) -> None:
    options = {"placement": "disaggregated", "max_num_restarts": 0}
    with launched(policy_spec, tmp_path / "log", **options) as (_, rollout):
        rollout.publish(0)
        (replica,) = replica_processes()
        replica.kill()
        with pytest.raises(ReplicaLostError, match="replica 0: its process died") as caught:
            rollout.generate(REQUESTS)
        assert "rollout.max_num_restarts: 0 are used up" in caught.value.__notes__[0]


PROMPT = tuple(range(4, 10))
LONG = [
    RolloutRequest(f"long{i}", PROMPT, SamplingParams(24), tuple(range(9 * i, 9 * i + 9)))
    for i in range(400)
]


def strike(rollout: ServedRollout, victim: psutil.Process, signal_name: str) -> None:
    """As soon as every replica samples; the batch takes many times as long as this question."""
    end = time.monotonic() + 60
    while not all(health.num_running for health in rollout.health()):
        assert time.monotonic() < end
    victim.send_signal(getattr(signal, signal_name))


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_a_replica_lost_while_it_samples_is_replaced(
    policy_spec: PolicySpec, tmp_path: Path, signal_name: str
) -> None:
    """Its share is sampled again from the same weights: bitwise the same batch comes of it."""
    options = {"placement": "disaggregated", "num_replicas": 2, "silence_s": 3.0}
    with launched(policy_spec, tmp_path / "whole", **options) as (_, rollout):
        rollout.publish(3)
        expected = rollout.generate(LONG)
    with launched(policy_spec, tmp_path / "lost", **options) as (workers, rollout):
        assert isinstance(rollout, ServedRollout)
        rollout.publish(3)
        victim = replica_processes()[0]
        at_work = threading.Thread(target=strike, args=(rollout, victim, signal_name))
        at_work.start()
        assert rollout.generate(LONG) == expected
        at_work.join()
        assert rollout.num_restarts == 1
        assert not victim.is_running()
        # The one in its place gets the weights of the time when it is up, and serves them.
        workers.run(PolicyWorker.train_mini_batch, BATCH, sft_loss_fn())
        rollout.publish(4)
        end = time.monotonic() + 120
        while rollout.states() != [ReplicaState.HEALTHY] * 2:
            assert time.monotonic() < end, rollout.states()
            rollout.generate(REQUESTS)
        assert [health.version for health in rollout.health()] == [4, 4]


def test_a_replica_that_comes_late_gets_no_other_weights(
    policy_spec: PolicySpec, tmp_path: Path
) -> None:
    """The trainer went on: what it holds now is not what was published."""
    with launched(policy_spec, tmp_path / "log", placement="disaggregated") as (workers, rollout):
        rollout.publish(0)
        workers.run(PolicyWorker.train_mini_batch, BATCH, sft_loss_fn())
        replica_processes()[0].kill()
        with pytest.raises(WeightSyncError, match="version 0 was published as"):
            rollout.generate(REQUESTS)


def test_all_replicas_lost_before_a_sync_are_replaced_by_it(
    policy_spec: PolicySpec, tmp_path: Path
) -> None:
    with launched(policy_spec, tmp_path / "log", placement="disaggregated") as (_, rollout):
        rollout.publish(0)
        expected = rollout.generate(REQUESTS)
        replica_processes()[0].kill()
        rollout.publish(0)
        assert rollout.generate(REQUESTS) == expected
