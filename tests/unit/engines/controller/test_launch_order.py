"""In which order models start that share this process."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines.controller import launch
from engines.controller.launch import launch_served_model, policy_replica
from engines.controller.model_worker import WorkerSpec
from engines.controller.replica import ReplicaSpec


class Worker:
    started: list[str]

    def __init__(self, spec: WorkerSpec) -> None:
        self.started.append("reward model")

    def initialize(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_embedded_judge_starts_behind_the_reward_model(
    policy_spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert policy_spec.rollout is not None
    served = policy_replica(policy_spec, policy_spec.rollout, tmp_path / "served")
    Worker.started = []

    def start(spec: ReplicaSpec, *places: object) -> str:
        Worker.started.append(spec.log_dir.name)
        return spec.log_dir.name

    monkeypatch.setattr(launch, "launch_engines", start)
    monkeypatch.setattr(launch, "ModelWorker", Worker)
    judge = replace(served, log_dir=tmp_path / "judge")
    launched = launch_served_model(served, replace(policy_spec, rollout=None), judge)
    assert Worker.started == ["served", "reward model", "judge"]
    assert (launched.engines, launched.judge) == ("served", "judge")
