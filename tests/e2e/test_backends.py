"""The whole pipeline under other backends and layouts, and a model that changes backend.

What is learned is not looked at: a model of a few thousand parameters takes a handful of steps.
That a backend computes the same as the others is the contract tests' work.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipeline import RUN_DEADLINE_S, Home, ran

TWO_ROUNDS = (
    "rl.num_rounds=2",
    "rl.algorithm.use_kl_loss=true",
    "checkpoint.every_num_steps=1",
)
WAYS = {
    "fsdp-two-ranks-offload": (
        "training.backend=fsdp",
        "training.num_workers=2",
        "training.param_offload=true",
        "training.optimizer_offload=true",
    ),
    "lora-ulysses-background": (
        "training.ulysses_size=2",
        "training.lora.rank=4",
        "checkpoint.async_save=true",
    ),
    "megatron-tensor": ("training.backend=megatron", "training.tensor_parallel_size=2"),
}


@pytest.mark.stacks
@pytest.mark.parametrize("way", WAYS)
def test_a_run_under_another_layout_ends_well(tmp_path: Path, way: str) -> None:
    home = Home(tmp_path / "run")
    report = home.run(*TWO_ROUNDS, *WAYS[way])
    assert report["promoted"] is True
    # Merged weights are those that were evaluated as the last policy.
    assert report["accuracy"]["final"] == report["accuracy"]["rl_round_2"]
    assert len(ran(report)) == 10
    if way.startswith("lora"):
        check_adapter_export(home.path, tmp_path / "adapter")


def check_adapter_export(home: Path, out: Path) -> None:
    """The adapter of any policy comes out alone; the directory holds what PEFT reads."""
    policy = sorted((home / "store" / "artifacts" / "policy").iterdir())[0]
    command = [
        sys.executable,
        "-m",
        "flows.commands.cli",
        "merge",
        str(policy),
        str(out),
        "--adapter-only",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(file.name for file in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
