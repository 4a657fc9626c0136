"""An engine that has processes of its own, of which one dies while the actor above it lives."""

import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engines.config.rollout import RolloutConfig
from engines.controller.launch import launch_policy_with_rollout
from engines.controller.policy_worker import PolicySpec
from engines.controller.replica import RemoteReplica
from engines.controller.rollout import ServedRollout
from engines.types import RolloutRequest, SamplingParams
from infra.job_environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.exclusive, pytest.mark.usefixtures("cluster")]

START_S = 180.0
LONG = [
    RolloutRequest(f"long{i}", (4, 5, 6), SamplingParams(24), tuple(range(9 * i, 9 * i + 9)))
    for i in range(200)
]


def actor_of(rollout: ServedRollout) -> psutil.Process:
    """The process of the only replica."""
    (slot,) = rollout._pool.slots
    assert isinstance(slot.engine, RemoteReplica)
    assert slot.engine._whereabouts is not None
    return psutil.Process(slot.engine._whereabouts.process.pid)


def strike(rollout: ServedRollout, victim: psutil.Process) -> None:
    """As soon as it samples."""
    end = time.monotonic() + 60
    while not all(health.num_running for health in rollout.health()):
        assert time.monotonic() < end
    victim.kill()


def test_an_engine_whose_subprocess_dies_is_replaced(
    policy_spec: PolicySpec, tmp_path: Path
) -> None:
    """Ray sees a healthy actor, and would send it the same requests for ever (ray#60145)."""
    if interpreter_of("vllm") is None:
        pytest.skip("needs the job environment vllm: make env-vllm")
    rollout_config = RolloutConfig(
        engine="vllm", placement="disaggregated", timeout_s=START_S, max_num_restarts=1
    )
    spec = replace(policy_spec, rollout=rollout_config)
    workers, rollout = launch_policy_with_rollout(spec, tmp_path)
    with closing(workers), closing(rollout):
        assert isinstance(rollout, ServedRollout)
        rollout.publish(3)
        actor = actor_of(rollout)
        below = actor.children(recursive=True)
        (victim,) = [p for p in below if "VLLM::EngineCore" in " ".join(p.cmdline())]
        at_work = threading.Thread(target=strike, args=(rollout, victim))
        at_work.start()
        rows = rollout.generate(LONG)
        at_work.join()
        assert not victim.is_running()
        assert rollout.num_restarts == 1
        assert actor_of(rollout).pid != actor.pid
        assert {c.finish_reason for row in rows for c in row} <= {"stop", "length"}
        assert {v for row in rows for c in row for v in c.policy_versions} == {3}
        assert [[c.sample_index for c in row] for row in rows] == [list(range(9))] * len(LONG)
        assert [health.version for health in rollout.health()] == [3]
