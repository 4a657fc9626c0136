"""The recipe on images: what it has from its source, and that nobody in it is without eyes."""

from pathlib import Path
from typing import Any

import pytest
from vision_cases import write_chat_model, write_geometry

from engines.config.training import HardwareConfig
from engines.jobs.preflight.run import check_request
from flows.plan import Planner
from flows.preflight import request_of
from flows.recipe.recipe import Recipe, load_recipe
from flows.stage_order import run_stages
from infra.errors import ConfigError
from infra.store.storage import LocalStorage

NAME = "grpo_geometry3k_qwen2.5_vl_7b"
KNOWN = HardwareConfig(platform="cpu", device_kind="x86_64")
EASY_R1: dict[str, Any] = {
    "max_prompt_length": 2048,
    "max_response_length": 2048,
    "rollout_batch_size": 512,
    "actor.global_batch_size": 128,
    "rollout.n": 5,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "val_override_config.temperature": 0.6,
    "val_override_config.top_p": 0.95,
    "optim.lr": 1e-6,
    "optim.weight_decay": 1e-2,
    "optim.lr_warmup_ratio": 0.0,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.3,
    "actor.clip_ratio_dual": 3.0,
    "actor.loss_avg_mode": "token",
    "kl_penalty": "low_var_kl",
    "kl_coef": 1e-2,
    "total_steps": 15 * (2101 // 512),
}
"""Its example with its defaults; the last batch of an epoch, which is no whole one, is left out."""


def as_easy_r1(recipe: Recipe) -> dict[str, Any]:
    """The same settings of a recipe, by the names that they have there."""
    rl, evaluation = recipe.rl, recipe.evaluation
    algorithm, optimizer = rl.algorithm, rl.optimizer
    assert (algorithm.adv_estimator, algorithm.use_kl_loss) == ("grpo", True)
    assert (algorithm.norm_adv_by_std_in_grpo, optimizer.schedule) == (True, "constant")
    assert (algorithm.use_kl_in_reward, rl.num_epochs) == (False, 1)
    assert recipe.data is not None
    return {
        "max_prompt_length": recipe.data.max_prompt_length,
        "max_response_length": rl.sampling.max_new_tokens,
        "rollout_batch_size": rl.batch_size_prompts,
        "actor.global_batch_size": rl.mini_batch_size_prompts,
        "rollout.n": rl.group_size,
        "rollout.temperature": rl.sampling.temperature,
        "rollout.top_p": rl.sampling.top_p,
        "val_override_config.temperature": evaluation.temperature,
        "val_override_config.top_p": evaluation.top_p,
        "optim.lr": optimizer.lr,
        "optim.weight_decay": optimizer.weight_decay,
        "optim.lr_warmup_ratio": float(optimizer.num_warmup_steps),
        "actor.clip_ratio_low": algorithm.clip_ratio_low,
        "actor.clip_ratio_high": algorithm.clip_ratio_high,
        "actor.clip_ratio_dual": algorithm.clip_ratio_c,
        "actor.loss_avg_mode": algorithm.loss_agg_mode.removesuffix("-mean"),
        "kl_penalty": algorithm.kl_loss_type,
        "kl_coef": algorithm.kl_loss_coef,
        "total_steps": rl.num_rounds * rl.num_steps_per_round,
    }


def test_it_has_the_numbers_of_its_source() -> None:
    recipe = load_recipe(NAME)
    assert as_easy_r1(recipe) == EASY_R1
    assert recipe.model.path == "Qwen/Qwen2.5-VL-7B-Instruct"
    target = recipe.target
    assert target is not None
    assert (target.metric, target.value) == ("pass@1", 0.48)
    assert "assets/baselines.md" in target.source
    assert (recipe.promote.metric, recipe.promote.min_value) == (target.metric, target.value)
    assert (recipe.evaluation.num_problems, recipe.evaluation.pass_at) == (None, (1,))


def test_it_plans_every_stage_without_a_network(tmp_path: Path) -> None:
    recipe = load_recipe(NAME).model_copy(update={"hardware": KNOWN})
    planner = Planner(LocalStorage(tmp_path / "store"), recipe.seed, {})
    run_stages(recipe, planner, lambda _: None)
    rounds = [f"{stage}rl_round_{n}" for n in range(1, 6) for stage in ("", "evaluate_")]
    labels = [stage.label for stage in planner.stages]
    assert labels == ["preprocess", *rounds, "merge", "evaluate", "promote"]


def looked_at(model: Path, rows: Path, *changes: str) -> None:
    """A plan's look, with the recipe's model and data in small."""
    source = f"[{{path: {rows}, format: geometry3k, options: {{instruction: ''}}}}]"
    small = (
        f"model={{path: {model}, max_length: 64}}",
        f"data={{rl: {source}, evaluation: {source}, max_prompt_length: 32, allow_overlap: true}}",
        "rl.sampling.max_new_tokens=32",
        "hardware={platform: cpu, device_kind: x86_64}",
    )
    found = request_of(load_recipe(NAME, [*small, *changes]))
    assert found is not None
    check_request(found)


def test_a_look_at_it_in_small_finds_nothing(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    write_geometry(tmp_path / "geometry")
    rows = tmp_path / "geometry.parquet"
    looked_at(model, rows)
    with pytest.raises(ConfigError, match=r"model\.path: .* which sees images; Ulysses cannot cut"):
        looked_at(model, rows, "training.ulysses_size=2")
