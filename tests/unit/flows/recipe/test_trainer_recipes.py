"""Recipes of the trainers around RL: their stages in order, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from engines.config.rules.models import check_value_model
from engines.config.stages.serving import SelfPlayStageConfig
from engines.config.stages.supervised import PreferenceStageConfig
from engines.config.training import HardwareConfig, TrainingConfig
from flows.plan import Planner
from flows.recipe.recipe import load_recipe
from flows.stage_order import run_stages
from infra.errors import ConfigError
from infra.store.storage import LocalStorage

KNOWN = HardwareConfig(platform="cpu", device_kind="x86_64")
PAIRS = "data.arithmetic.num_preference=64"
REWARD_MODEL = (PAIRS, "reward_model={}")
ASKED = (*REWARD_MODEL, "rl.reward={function: model, model: {}}")
ROOM = (
    "model.max_length=64",
    "data.max_prompt_length=48",
    "rl.sampling.max_new_tokens=6",
)
END = ["merge", "evaluate", "promote"]


def planned(name: str, root: Path, *overrides: str) -> list[Any]:
    recipe = load_recipe(name, overrides).model_copy(update={"hardware": KNOWN})
    planner = Planner(LocalStorage(root / "store"), recipe.seed, {})
    run_stages(recipe, planner, lambda _: None)
    return list(planner.stages)


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("sft", ["sft", "evaluate_sft"]),
        ("dpo", ["sft", "evaluate_sft", "preference", "evaluate_preference"]),
        ("kto", ["sft", "evaluate_sft", "preference", "evaluate_preference"]),
        (
            "rejection_sampling",
            [
                "sft",
                "evaluate_sft",
                "rl_round_1",
                "evaluate_rl_round_1",
                "rl_round_2",
                "evaluate_rl_round_2",
            ],
        ),
        (
            "spin",
            [
                "sft",
                "evaluate_sft",
                *(
                    f"{name}_{iteration}"
                    for iteration in (1, 2, 3)
                    for name in ("self_play", "preference", "evaluate_preference")
                ),
            ],
        ),
        (
            "distill",
            [
                "sft",
                "evaluate_sft",
                "rl_round_1",
                "evaluate_rl_round_1",
                "rl_round_2",
                "evaluate_rl_round_2",
            ],
        ),
    ],
)
def test_its_stages_in_order(name: str, middle: list[str], tmp_path: Path) -> None:
    stages = planned(name, tmp_path)
    assert [stage.label for stage in stages] == ["preprocess", *middle, *END]


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("sft_llama_7b", ["sft", "evaluate_sft"]),
        ("dpo_zephyr_7b", ["preference", "evaluate_preference"]),
        ("kto_zephyr_7b", ["preference", "evaluate_preference"]),
        (
            "distill_qwen3_8b",
            ["sft", "evaluate_sft"]
            + [f"{stage}rl_round_{n}" for n in (1, 2, 3) for stage in ("", "evaluate_")],
        ),
        (
            "rejection_sampling_llama_7b",
            ["sft", "evaluate_sft"]
            + [f"{stage}rl_round_{n}" for n in (1, 2, 3, 4) for stage in ("", "evaluate_")],
        ),
        (
            "rm_ppo_llama3_8b",
            ["reward_model"]
            + [f"{stage}rl_round_{n}" for n in (1, 2, 3, 4, 5) for stage in ("", "evaluate_")],
        ),
    ],
)
def test_a_published_size_names_its_source(name: str, middle: list[str], tmp_path: Path) -> None:
    stages = [stage.label for stage in planned(name, tmp_path)]
    assert [label for label in stages if "gsm8k" not in label] == ["preprocess", *middle, *END]
    target = load_recipe(name).target
    assert target is not None
    assert target.value is not None
    assert re.match(r"arXiv:\d{4}\.\d{5} ", target.source)


def test_rm_ppo_pipeline_ends_with_a_rule_based_evaluation(
    tmp_path: Path,
) -> None:
    stages = {stage.label: stage for stage in planned("rm_ppo", tmp_path)}
    assert [*stages][:4] == ["preprocess_addition", "preprocess", "sft", "reward_model"]
    assert [*stages][-4:] == ["merge", "evaluate", "evaluate_addition", "promote"]


def test_preferences_alone_train_the_model_itself(tmp_path: Path) -> None:
    stages = planned("quickstart", tmp_path, "sft=null", "rl.num_rounds=0", PAIRS, "preference={}")
    labels = [stage.label for stage in stages]
    assert labels == ["preprocess", "preference", "evaluate_preference", *END]


def test_another_iteration_repeats_none() -> None:
    few, more = (
        load_recipe("quickstart", [f"preference={{self_play: {{num_iterations: {number}}}}}"])
        for number in (3, 4)
    )
    assert [*more.preference_iterations] == [1, 2, 3, 4]
    for iteration in few.preference_iterations:
        for stage in (SelfPlayStageConfig, PreferenceStageConfig):
            first, second = (stage.from_recipe(each, iteration) for each in (few, more))
            assert first.identity_values() == second.identity_values()
    seeds = [
        SelfPlayStageConfig.from_recipe(few, iteration).identity_values()["iteration"]
        for iteration in (1, 2)
    ]
    assert seeds == [1, 2], "whose answers differ where the policy does not"


def test_recipe_self_play_uses_no_data_pairs_and_its_own_reward(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["preference={self_play: {}}", "rl.reward.timeout_s=3"])
    assert recipe.data.arithmetic is not None
    assert recipe.data.arithmetic.num_preference == 0
    assert SelfPlayStageConfig.from_recipe(recipe, 1).reward.timeout_s == 10
    by_reward = load_recipe(
        "quickstart", ["preference={self_play: {source: best_worst}}", "rl.reward.timeout_s=3"]
    )
    assert SelfPlayStageConfig.from_recipe(by_reward, 1).reward.timeout_s == 3
    asks = ("preference={self_play: {source: best_worst, num_iterations: 2}}", *ASKED)
    labels = [stage.label for stage in planned("quickstart", tmp_path, *asks)]
    assert labels[3:7] == ["evaluate_sft", "self_play_1", "preference_1", "evaluate_preference_1"]


def test_a_soup_is_of_the_last_policies(tmp_path: Path) -> None:
    stages = planned("quickstart", tmp_path, "rl.num_rounds=2", "soup={num_policies: 2}")
    labels = [stage.label for stage in stages]
    merges = ["merge_rl_round_1", "merge_rl_round_2"]
    assert labels[-5:] == [*merges, "soup", "evaluate", "promote"]


def test_a_reward_model_that_nobody_asks_is_trained_all_the_same(tmp_path: Path) -> None:
    stages = planned("quickstart", tmp_path, *REWARD_MODEL)
    labels = [stage.label for stage in stages]
    assert labels[:4] == ["preprocess", "sft", "reward_model", "evaluate_sft"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["preference={}"], r"data.arithmetic.num_preference: got 0; .*; raise it"),
        (["reward_model={}"], r"data.arithmetic.num_preference: got 0"),
        (["soup={num_policies: 5}"], r"soup.num_policies: got 5; need at most 4"),
        ([PAIRS, "preference={loss: dpo}"], r"preference.loss: no 'dpo'; known: .*sigmoid"),
        (
            [PAIRS, "preference={options: {gamma: 1.0}}"],
            r"preference.options.gamma: not an option of sigmoid",
        ),
        (
            [PAIRS, "preference={loss: simpo, options: {beta: -1.0}}"],
            r"preference.options.beta: ",
        ),
        (
            [PAIRS, "preference={batch_size_pairs: 5}", "training.num_workers=2"],
            r"preference.batch_size_pairs: 5 is not a multiple of the 2 data-parallel ranks",
        ),
        (
            [PAIRS, "preference={num_steps: 5, optimizer: {num_warmup_steps: 5}}"],
            r"preference.optimizer.num_warmup_steps: got 5; need less than the 5",
        ),
        (
            [*REWARD_MODEL, "reward_model.options={margin: 1.0}"],
            r"reward_model.options.margin: not an option of bradley_terry",
        ),
        (
            ["rl.reward={function: model, model: {}}"],
            r"rl.reward.model.path: missing, and no stage trains a reward model",
        ),
        (
            ["rl.reward={function: judge, judge: {prompt: x}}"],
            r"rl.reward.judge.path: missing",
        ),
        (["sft=null", "rl.num_rounds=0"], r"rl.num_rounds: got 0 with sft: null"),
        (["sft=null", "preference={self_play: {}}"], r"preference.self_play: got one with sft: nu"),
        (
            [*ROOM, "preference={self_play: {sampling: {max_new_tokens: 64}}}"],
            r"^preference.self_play.sampling.max_new_tokens: got 64; need less than "
            r"model.max_length 64, which an answer shares with its prompt; lower it$",
        ),
        (
            [*ROOM, "preference={self_play: {source: best_worst, sampling: {max_new_tokens: 17}}}"],
            r"^preference.self_play.sampling.max_new_tokens: 48 \(data.max_prompt_length\) \+ 17 = "
            r"65 tokens exceeds model.max_length 64; lower it to 16$",
        ),
        (
            [*ROOM, "data.max_prompt_length=64"],
            r"^rl.sampling.max_new_tokens: .*; lower data.max_prompt_length to 58$",
        ),
        (
            [*ROOM, "data.max_prompt_length=64", "rl.sampling.max_new_tokens=64"],
            r"^rl.sampling.max_new_tokens: .* exceeds model.max_length 64; lower both$",
        ),
    ],
)
def test_what_could_not_run_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_recipe("quickstart", overrides)


def test_no_setting_limits_what_spin_asks() -> None:
    for sampling in ("source: spin, sampling: {max_new_tokens: 63}", "source: best_worst"):
        load_recipe("quickstart", [*ROOM, f"preference={{self_play: {{{sampling}}}}}"])


def test_pairs_of_files_are_asked_for(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    names = ("sft", "rl", "evaluation")
    files = ["data.arithmetic=null", *(f"data.{name}=[{{path: {rows}}}]" for name in names)]
    with pytest.raises(ConfigError, match=r"data.preference: missing; the recipe has a stage"):
        load_recipe("quickstart", [*files, "preference={}"])
    files.append(f"data.preference=[{{path: {tmp_path}/nope.jsonl}}]")
    with pytest.raises(ConfigError, match=r"data.preference.0.path: .*nope.jsonl does not exist"):
        load_recipe("quickstart", [*files, "preference={}"])


def test_a_backend_without_value_models_trains_no_reward_model() -> None:
    with pytest.raises(ConfigError, match=r"reward_model: got one with training.backend torchtit"):
        check_value_model("reward_model", TrainingConfig(backend="torchtitan"))


def test_an_evaluation_waits_for_the_reward_model_that_it_asks(tmp_path: Path) -> None:
    labels = [stage.label for stage in planned("quickstart", tmp_path, *ASKED)]
    assert labels[1:5] == ["sft", "reward_model", "evaluate_sft", "rl_round_1"]
