"""Stages that commit the average of their weights: what follows starts from it, and is merged."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_pipeline import Home, settings

from engines.checkpoint.engine_state import read_scalars
from engines.checkpoint.sharded import ShardedReader

AVERAGED = (
    "sft.optimizer.ema={decay: 0.9}",
    "rl.optimizer.ema={decay: 0.5, use_warmup: false}",
    "rl.num_rounds=2",
)


def weights_of(policy: Path) -> dict[str, torch.Tensor]:
    reader = ShardedReader(policy / "checkpoint" / "tensors")
    names = [name for name in reader.names() if name.startswith("model.")]
    return {name.removeprefix("model."): reader.read(name) for name in names}


@pytest.mark.stacks
def test_rounds_go_on_from_averages_and_the_last_one_is_merged(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = Home(tmp_path_factory.mktemp("averages") / "run")
    report = home.run(*AVERAGED)
    stages = {stage["name"]: stage for stage in report["stages"]}
    root = home.path / "store" / "artifacts"
    policies = [
        root / "policy" / stages[name]["digest"] for name in ("sft", "rl_round_1", "rl_round_2")
    ]
    for policy in policies:
        names = ShardedReader(policy / "checkpoint" / "tensors").names()
        assert any(name.startswith("optimizer.exp_avg.") for name in names)
        assert not any(name.startswith("optimizer.ema.") for name in names)
        assert read_scalars(policy / "checkpoint").num_averaged is None
    # Adam's count goes on over the rounds; the average of each is its own.
    assert read_scalars(policies[2] / "checkpoint").num_optimizer_steps == 4
    model = load_file(root / "model" / stages["merge"]["digest"] / "model.safetensors")
    last, before = weights_of(policies[2]), weights_of(policies[1])
    assert all(torch.equal(model[name], last[name]) for name in model)
    assert any(not torch.equal(before[name], last[name]) for name in model)
    assert "  submitted" not in home.rlhf("run", *settings(*AVERAGED))
