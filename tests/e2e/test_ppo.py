"""PPO through the whole pipeline: two roles on two ranks, killed between their updates."""

from pathlib import Path

import pytest
from tiny_pipeline import Home, ran

PPO = (
    "rl.num_rounds=2",
    "rl.algorithm={adv_estimator: gae, options: {lam: 0.95}, use_kl_loss: true}",
    "rl.critic={num_warmup_steps: 1, optimizer: {lr: 1.0e-2}}",
    "rl.refresh_reference=true",
    "training.num_workers=2",
    "training.lora.rank=4",
    "checkpoint.every_num_steps=1",
)


@pytest.mark.slow
def test_killed_between_critic_and_policy_both_go_on_bitwise(tmp_path: Path) -> None:
    whole = Home(tmp_path / "whole")
    expected = whole.run(*PPO)
    killed = Home(tmp_path / "killed")
    # Every round dies in its second step; what is started again passes this point once.
    killed.environment["RLHF_FAULTS"] = "rl.critic_updated=kill@2"
    report = killed.run(*PPO)
    assert ran(report) == ran(expected)
    digests = [{s["name"]: s["digest"] for s in each["stages"]} for each in (report, expected)]
    assert digests[0] == digests[1]
    for metric in ("critic/loss", "actor/loss", "critic/vf_explained_var"):
        assert sorted(killed.values(metric)) == sorted(whole.values(metric))
    assert len(whole.values("critic/loss")) == 4
    # The first step of the first round warms the critic up.
    assert len(whole.values("actor/loss")) == 3
    attempts = {s["name"]: s["attempt"] for s in report["stages"] if "attempt" in s}
    assert all(attempts[f"rl_round_{n}"] == 1 for n in (1, 2) if attempts)
