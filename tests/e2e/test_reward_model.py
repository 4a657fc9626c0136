"""A reward model in the whole pipeline: it judges, and a critic starts as it."""

from pathlib import Path

import pytest
import torch
from tiny_pipeline import Home, settings
from transformers import AutoModelForSequenceClassification

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer

SHAPE = ArchitectureConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64
)


def write_models(root: Path) -> tuple[Path, Path]:
    """A policy, and a reward model of the same tokens."""
    tokenizer = train_tokenizer(
        TokenizerConfig(), ["0123456789+="], root / "tokenizer", max_length=64, chat_template=None
    )
    policy, judge = root / "policy", root / "judge"
    create_random_model(SHAPE, tokenizer, 64, 5, policy)
    create_random_model(SHAPE, tokenizer, 64, 6, judge)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(7))
    (judge / "model.safetensors").unlink()
    model.save_pretrained(judge)
    return policy, judge


@pytest.mark.stacks
def test_rounds_and_evaluations_are_judged_by_a_model(tmp_path: Path) -> None:
    policy, judge = write_models(tmp_path)
    home = Home(tmp_path / "run")
    asked = (
        f"model={{init: pretrained, path: {policy}, max_length: 64}}",
        f"rl.reward={{function: model, model: {{path: {judge}}}}}",
        "rl.algorithm={adv_estimator: gae, options: {lam: 0.95}}",
        "rl.critic={start: reward_model, optimizer: {lr: 1.0e-2}}",
        "sft=null",
    )
    report = home.run(*asked, "rl.num_rounds=2")
    by_name = {stage["name"]: stage for stage in report["stages"]}
    assert {"evaluate_rl_round_1", "rl_round_2"} <= by_name.keys()
    scores = home.values("critic/score/mean")
    assert len(scores) == 4
    assert len({round(score, 6) for score in scores}) == 4
    # A head of 0 would have explained nothing of the first step.
    assert home.values("critic/vf_explained_var")[0] != 0.0
    assert by_name["evaluate"]["metrics"]["reward/mean"] != 0.0
    # The model is an input: other files are another stage.
    assert status(home.rlhf("plan", *settings(*asked)), "rl_round_1") == "hit"
    with (judge / "config.json").open("a") as file:
        file.write("\n")
    assert status(home.rlhf("plan", *settings(*asked)), "rl_round_1") == "miss"


@pytest.mark.stacks
def test_judge_scores_match_colocated_and_disaggregated(tmp_path: Path) -> None:
    policy, judge = write_models(tmp_path)
    asked = (
        f"model={{init: pretrained, path: {policy}, max_length: 64}}",
        "rl.reward={function: judge, kwargs: {scale: 0.1}, max_unscored_frac: 0.9, judge: "
        f"{{path: {policy}, max_length: 64, prompt: '{{{{ question }}}}{{{{ answer }}}}', "
        "sampling: {temperature: 1, max_new_tokens: 8}}}",
        "sft=null",
    )
    shared, apart = Home(tmp_path / "shared"), Home(tmp_path / "apart")
    expected = shared.run(*asked)
    assert len(set(shared.values("critic/score/mean"))) == 2
    found = apart.run(*asked, "rollout.placement=disaggregated")
    for before, after in zip(expected["stages"], found["stages"], strict=True):
        assert (before["name"], before["digest"]) == (after["name"], after["digest"])


@pytest.mark.slow
def test_preferences_reach_the_policy_through_a_reward_model(tmp_path: Path) -> None:
    """The recipe as it ships, in fewer steps: it names no length of what its model reads."""
    home = Home(tmp_path / "run", recipe="rm_ppo")
    few = {
        "data.arithmetic.num_sft": 64,
        "data.arithmetic.num_rl": 64,
        "data.arithmetic.num_eval": 16,
        "data.arithmetic.num_preference": 64,
        "data.arithmetic.num_preference_eval": 16,
        "sft.num_steps": 2,
        "reward_model.num_steps": 2,
        "reward_model.batch_size_pairs": 16,
        "rl.num_steps_per_round": 1,
        "rl.batch_size_prompts": 16,
        "rl.mini_batch_size_prompts": 16,
        "rl.critic.num_warmup_steps": 0,
        "evaluation.num_problems": 16,
        "promote.min_value": 0.0,
        **{f"{name}.optimizer.num_warmup_steps": 0 for name in ("sft", "reward_model", "rl")},
    }
    report = home.run(*(f"{name}={value}" for name, value in few.items()))
    by_name = {stage["name"]: stage for stage in report["stages"]}
    assert {"reward_model", "rl_round_1", "evaluate_addition", "promote"} <= by_name.keys()
    assert by_name["evaluate_sft"]["metrics"]["reward/mean"] != 0.0


def status(planned: str, stage: str) -> str:
    """What a plan says of a stage."""
    [line] = [line for line in planned.splitlines() if line.split()[:1] == [stage]]
    return line.split()[2]
