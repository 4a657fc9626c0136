"""The whole pipeline under other backends and layouts, and a model that changes backend.

What is learned is not looked at: a model of a few thousand parameters takes a handful of steps.
That a backend computes the same as the others is the contract tests' work.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RECIPE = """
name: tiny
model:
  init: random
  architecture: {hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
                 intermediate_size: 64}
  max_length: 64
data:
  arithmetic: {num_digits: 2, num_sft: 64, num_rl: 64, num_eval: 16}
  max_prompt_length: 48
sft: {num_steps: 3, batch_size_sequences: 8, optimizer: {lr: 1.0e-3}}
rl:
  num_rounds: 2
  num_steps_per_round: 2
  batch_size_prompts: 4
  group_size: 4
  sampling: {max_new_tokens: 6}
  optimizer: {lr: 1.0e-3}
  algorithm: {use_kl_loss: true}
checkpoint: {every_num_steps: 1}
promote: {model_name: tiny, min_value: 0.0}
"""
RUN_DEADLINE_S = 600.0
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


def run(home: Path, *overrides: str) -> dict:
    """Run the recipe; its report."""
    recipe = home.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_", "RAY_", "RLHF_"))
    } | {"RLHF_HOME": str(home), "COLUMNS": "200"}
    sets = [word for override in overrides for word in ("--set", override)]
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(recipe), *sets],
        capture_output=True,
        text=True,
        env=environment,
        timeout=RUN_DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = re.search(r"^report +(\S+)$", ended.stdout, re.M)
    assert path is not None, ended.stdout
    return json.loads(Path(path[1]).with_name("report.json").read_text())


@pytest.mark.parametrize("way", WAYS)
def test_a_run_under_another_layout_ends_well(tmp_path: Path, way: str) -> None:
    report = run(tmp_path / "home", *WAYS[way])
    assert report["promoted"] is True
    # Merged weights are those that were evaluated at the end of the last round.
    assert report["accuracy"]["final"] == report["accuracy"]["rl_round_2"]
    assert len([stage for stage in report["stages"] if not stage["reused"]]) == 7
    if way.startswith("lora"):
        check_adapter_export(tmp_path / "home", tmp_path / "adapter")


def check_adapter_export(home: Path, out: Path) -> None:
    """The adapter of any policy comes out alone; the directory holds what PEFT reads."""
    policy = sorted((home / "store" / "artifacts" / "policy").iterdir())[0]
    command = [sys.executable, "-m", "flows.cli", "merge", str(policy), str(out), "--adapter-only"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(file.name for file in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
