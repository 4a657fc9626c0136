"""Problems with images through the jobs that read them, each a process, one after the other."""

import subprocess
import sys
from pathlib import Path

import pytest
from vision_cases import write_chat_model, write_geometry

from engines.config.stages.base import StageConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.final import EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from flows.recipe.recipe import load_recipe
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import LocalStorage

DEADLINE_S = 300.0
HOLDER = Holder(id="test", process="test")


def done(root: Path, stage: StageConfig, inputs: dict[str, Artifact]) -> CommitRecord:
    """Run the job of a stage to its end."""
    store, fingerprint = LocalStorage(root), f"{stage.stage.encode().hex():0<64.64}"
    spec = StageSpec(
        stage=stage.stage,
        job_module=f"engines.jobs.{stage.stage}",
        fingerprint=fingerprint,
        attempt=0,
        holder=HOLDER.id,
        config=stage.model_dump(mode="json"),
        inputs=inputs,
        seed=0,
        store_uri=str(root),
    )
    store.attempts.hold(fingerprint, HOLDER, 0)
    store.channel(fingerprint).write_specification(spec)
    command = [sys.executable, *spec.job_argv]
    job = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert job.returncode == 0, job.stderr
    record = store.lookup(fingerprint)
    assert record is not None
    return record


def test_preprocess_drops_prompts_too_long_with_their_images(tmp_path: Path) -> None:
    """Every other problem, which shows two; with a placeholder for each, none would be too long."""
    write_chat_model(tmp_path / "model")
    write_geometry(tmp_path / "geometry")
    source = f"[{{path: {tmp_path}/geometry.parquet, format: geometry3k}}]"
    recipe = load_recipe(
        "quickstart",
        [
            "data={arithmetic: null, max_prompt_length: 16, on_overlong: drop}",
            f"data.rl={source.replace('k}', 'k, options: {instruction: x}}')}",
            f"data.evaluation={source.replace('k}', 'k, options: {instruction: y}}')}",
            "sft=null",
            f"model={{init: pretrained, path: {tmp_path}/model, max_length: 64}}",
        ],
    )
    data = done(tmp_path / "store", PreprocessStageConfig.from_recipe(recipe), {})
    assert (data.metrics["num_rl"], data.metrics["num_eval"]) == (4, 4)


@pytest.mark.slow
def test_preprocess_then_a_round_then_an_evaluation(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_chat_model(model)
    write_geometry(tmp_path / "geometry")
    options = "format: geometry3k, options: {instruction: ''}"
    source = f"[{{path: {tmp_path}/geometry.parquet, {options}}}]"
    recipe = load_recipe(
        "quickstart",
        [
            "data.arithmetic=null",
            f"data.rl={source}",
            f"data.evaluation={source}",
            "data.allow_overlap=true",
            "sft=null",
            "model.init=pretrained",
            f"model.path={model}",
            "model.max_length=64",
            "rl.sampling.max_new_tokens=6",
            "rl.batch_size_prompts=4",
            "rl.mini_batch_size_prompts=null",
            "rl.group_size=2",
            "rl.num_steps_per_round=2",
            "rl.reward={function: math}",
            "evaluation={num_samples: 0}",
            "hardware={platform: cpu, device_kind: x86_64}",
        ],
    )
    store = tmp_path / "store"
    data = done(store, PreprocessStageConfig.from_recipe(recipe), {})
    assert (data.metrics["num_rl"], data.metrics["num_eval"]) == (8, 8)
    policy = done(store, RLRoundStageConfig.from_recipe(recipe, 1), {"dataset": data.artifact})
    assert policy.metrics["num_steps"] == 2
    inputs = {"dataset": data.artifact, "policy": policy.artifact}
    found = done(store, EvaluateStageConfig.from_recipe(recipe, "rl_round_1"), inputs)
    assert (found.metrics["num_problems"], found.metrics["num_unscored"]) == (8, 0)
