"""A whole round one of whose replicas is killed or stopped, while it samples or takes weights."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tiny_pipeline import RUN_DEADLINE_S, Home, settings

from infra.waiting import wait_for

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

ROUND = (
    "rollout.placement=disaggregated",
    "rollout.num_replicas=2",
    "rollout.silence_s=3",
    "rl.num_steps_per_round=3",
    "rl.batch_size_prompts=16",
    "rl.group_size=16",
    "rl.sampling.max_new_tokens=40",
    "model.max_length=96",
    # Rewards of so small a model are all equal, and nothing else would move its weights.
    "rl.algorithm.entropy_coeff=-0.05",
)


def digest_of_round(report: dict) -> str:
    (found,) = [stage for stage in report["stages"] if stage["name"] == "rl_round_1"]
    assert not found["reused"]
    return found["digest"]


def replicas_of(home: Home) -> list[psutil.Process]:
    """Replicas of this home's runs, oldest first."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        if "ray::ReplicaProcess" not in " ".join(process.info["cmdline"] or []):
            continue
        try:
            ours = process.environ().get("RLHF_HOME") == str(home.path)
        except psutil.Error:
            continue
        if ours:
            found.append(process)
    return sorted(found, key=lambda process: process.info["create_time"])


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_fault_row_5_round_losing_a_replica_yields_same_policy(
    tmp_path: Path, signal_name: str
) -> None:
    home = Home(tmp_path / "run")
    expected = digest_of_round(home.run(*ROUND))
    steps = len(home.values("rollout/num_restarts"))
    assert steps == 3
    assert min(home.values("actor/grad_norm")) > 0
    run = subprocess.Popen(
        home.command("run", *settings(*ROUND), "--force", "rl_round_1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=home.environment,
    )
    try:

        def is_behind_its_first_step() -> bool:
            """The replica has weights, and most of its time it samples."""
            assert run.poll() is None
            return len(home.values("rollout/num_restarts")) > steps

        wait_for(is_behind_its_first_step, "the first step", RUN_DEADLINE_S, poll_s=0.02)
        os.kill(replicas_of(home)[0].pid, getattr(signal, signal_name))
        printed, _ = run.communicate(timeout=RUN_DEADLINE_S)
    finally:
        run.kill()
    assert run.returncode == 0, printed
    assert home.values("rollout/num_restarts").count(1.0) >= 1
    assert len(home.values("rollout/num_restarts")) == 2 * steps
    assert digest_of_round(home.report(printed)) == expected


def test_ranks_survive_a_replica_killed_during_weight_sync(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path / "run")
    asked = (*ROUND, "rollout.num_replicas=1", "training.num_workers=2")
    expected = digest_of_round(home.run(*asked))
    # Of four updates the third; the replica that takes its place has two left.
    home.environment["RLHF_FAULTS"] = "weights.bucket_read=kill@3"
    printed = home.rlhf("run", *settings(*asked), "--force", "rl_round_1")
    assert home.values("rollout/num_restarts").count(1.0) >= 1
    assert digest_of_round(home.report(printed)) == expected
