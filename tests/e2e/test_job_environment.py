"""A pipeline whose training stages run in a job environment of their own, with two ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra import env
from infra.job_environments import interpreter_of

pytestmark = pytest.mark.slow

RECIPE = """
name: tiny
model:
  init: random
  architecture: {hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
                 intermediate_size: 64}
  max_length: 64
training: {backend: veomni, num_workers: 2}
data:
  arithmetic: {num_digits: 2, num_sft: 64, num_rl: 64, num_eval: 16}
  max_prompt_length: 48
sft: {num_steps: 2, batch_size_sequences: 8, optimizer: {lr: 1.0e-3}}
rl:
  num_rounds: 1
  num_steps_per_round: 1
  batch_size_prompts: 4
  group_size: 4
  sampling: {max_new_tokens: 6}
  optimizer: {lr: 1.0e-3}
promote: {model_name: tiny, min_value: 0.0}
"""
DEADLINE_S = 600.0


def test_a_pipeline_in_the_environment_of_veomni(tmp_path: Path) -> None:
    if interpreter_of("veomni") is None:
        pytest.skip("needs the job environment veomni: make env-veomni")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    home = tmp_path / "home"
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(recipe)],
        capture_output=True,
        text=True,
        env=env.child_environment(RLHF_HOME=str(home), COLUMNS="200"),
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = re.search(r"^report +(\S+)$", ended.stdout, re.M)
    assert path is not None, ended.stdout
    report = json.loads(Path(path[1]).with_name("report.json").read_text())
    assert [stage["name"] for stage in report["stages"]][1:3] == ["sft", "rl_round_1"]
    policies = list((home / "store").rglob("engine.json"))
    scalars = [json.loads(file.read_text()) for file in policies]
    assert {(one["backend"], one["world_size"]) for one in scalars} == {("veomni", 2)}
    assert len(policies) == 2
    specs = [json.loads(file.read_text()) for file in (home / "work").rglob("spec.json")]
    assert {spec["stage"] for spec in specs} >= {"sft", "rl_round", "merge", "evaluate"}
