"""PPO through the whole pipeline: two roles on two ranks, killed between their updates."""

from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

PPO = (
    "rl.algorithm={adv_estimator: gae, options: {lam: 0.95}, use_kl_loss: true}",
    "rl.critic={num_warmup_steps: 1, optimizer: {lr: 1.0e-2}}",
    "rl.refresh_reference=true",
    "training.num_workers=2",
    "training.lora.rank=4",
    "checkpoint.every_num_steps=1",
)


@pytest.mark.stacks
def test_killed_between_critic_and_policy_both_go_on_bitwise(tmp_path: Path) -> None:
    """The critic is in the policy's artifact, so the artifact's digest is that of both."""
    whole = Home(tmp_path / "whole")
    expected = digests(whole.run(*PPO, "rl.num_rounds=2"))
    assert len(whole.values("critic/loss")) == 4
    # The first step of the first round warms the critic up.
    assert len(whole.values("actor/loss")) == 3
    killed = Home(tmp_path / "killed")
    killed.environment["RLHF_FAULTS"] = "rl.critic_updated=kill@2"
    died = killed.start("run", *settings(*PPO))
    assert died.returncode == 1
    assert "fault injected at rl.critic_updated: kill" in died.stdout + died.stderr
    del killed.environment["RLHF_FAULTS"]
    printed = killed.rlhf("run", *settings(*PPO))
    assert "continuing after step 1 of 2" in printed
    assert digests(killed.report(printed))["rl_round_1"] == expected["rl_round_1"]


def digests(report: dict) -> dict[str, str]:
    return {stage["name"]: stage["digest"] for stage in report["stages"]}
