"""An engine that has processes of its own, of which one dies while the actor above it lives."""

import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.rollout import RolloutConfig
from engines.controller.launch import launch_policy_beside
from engines.controller.model_worker import WorkerSpec
from engines.controller.replica import RemoteReplica
from engines.controller.rollout import ServedRollout
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.training.spec import POLICY, ModelSource
from engines.types import RolloutRequest, SamplingParams
from infra.job_environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.exclusive, pytest.mark.usefixtures("cluster")]

START_S = 240.0
NUM_SAMPLES = 9
LONG = [
    RolloutRequest(
        f"long{i}",
        (4, 5, 6),
        SamplingParams(24),
        tuple(range(NUM_SAMPLES * i, NUM_SAMPLES * (i + 1))),
    )
    for i in range(200)
]
COMPUTES = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler"}
"""What the process is called that holds the model, by engine."""


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM has no smaller heads on a CPU."""
    root = tmp_path_factory.mktemp("wide-policy")
    tokenizer_dir = train_tokenizer(
        TokenizerConfig(), ["0123456789+="], root / "tokenizer", max_length=32, chat_template=None
    )
    shape = ArchitectureConfig(hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=64)
    create_random_model(shape, tokenizer_dir, 32, 5, root / "model")
    return root / "model"


def actor_of(rollout: ServedRollout) -> psutil.Process:
    """The process of the only replica."""
    (slot,) = rollout._pool.slots
    assert isinstance(slot.engine, RemoteReplica)
    assert slot.engine._location is not None
    return psutil.Process(slot.engine._location.process.pid)


def strike(rollout: ServedRollout, victim: psutil.Process) -> None:
    """As soon as it samples."""
    end = time.monotonic() + 60
    while not all(health.num_running for health in rollout.health()):
        assert time.monotonic() < end
    victim.kill()


@pytest.mark.parametrize("engine", COMPUTES)
def test_fault_row_6_an_engine_whose_subprocess_dies_is_replaced(
    policy_spec: WorkerSpec, wide_model_dir: Path, tmp_path: Path, engine: str
) -> None:
    """Ray sees a healthy actor, and would send it the same requests for ever (ray#60145)."""
    if interpreter_of(engine) is None:
        pytest.skip(f"needs the job environment {engine}: make env-{engine}")
    spec = replace(
        policy_spec,
        roles={POLICY: replace(policy_spec.policy, source=ModelSource(wide_model_dir))},
        serving_dir=wide_model_dir,
        rollout=RolloutConfig(
            engine=engine, placement="disaggregated", timeout_s=START_S, max_num_restarts=1
        ),
    )
    workers, rollout, _ = launch_policy_beside(spec, {}, tmp_path)
    with closing(workers), closing(rollout):
        assert isinstance(rollout, ServedRollout)
        rollout.publish(3)
        actor = actor_of(rollout)
        below = actor.children(recursive=True)
        (victim,) = [p for p in below if COMPUTES[engine] in " ".join(p.cmdline())]
        at_work = threading.Thread(target=strike, args=(rollout, victim))
        at_work.start()
        rows = rollout.generate(LONG)
        at_work.join()
        assert not victim.is_running()
        assert rollout.num_restarts == 1
        assert actor_of(rollout).pid != actor.pid
        assert {c.finish_reason for row in rows for c in row} <= {"stop", "length"}
        assert {v for row in rows for c in row for v in c.policy_versions} == {3}
        samples = [[c.sample_index for c in row] for row in rows]
        assert samples == [list(range(NUM_SAMPLES))] * len(LONG)
        assert [health.version for health in rollout.health()] == [3]
