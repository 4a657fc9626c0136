"""One recipe per algorithm and size: each loads, plans, and says what its paper says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.supervised import SFTStageConfig
from engines.config.training import HardwareConfig
from flows.plan import Planner
from flows.recipe.recipe import Recipe, load_recipe
from flows.recipe.source import RECIPES_DIR, shipped_names
from flows.stage_order import run_stages, stages_of
from infra.store.storage import LocalStorage

CPU = (
    "ppo", "grpo", "dr_grpo", "dapo", "vapo", "gspo", "rloo", "reinforce_plus_plus", "remax",
    "pf_ppo", "lora_grpo",
)  # fmt: skip
PUBLISHED = (
    "ppo_qwen2.5_0.5b", "grpo_deepseek_math_7b", "dr_grpo_qwen2.5_math_7b", "dapo_qwen2.5_32b",
    "vapo_qwen2.5_32b", "gspo_qwen3_30b_a3b", "rloo_mixtral_8x22b",
    "reinforce_plus_plus_llama3_8b", "remax_qwen2.5_7b", "pf_ppo_qwen1.5_7b",
    "lora_grpo_qwen2.5_0.5b",
)  # fmt: skip
KNOWN = HardwareConfig(platform="cpu", device_kind="x86_64")
"""What a preflight would have found; a plan needs no device of that kind."""

DAPO_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
ALGORITHMS: dict[str, dict[str, Any]] = {
    # arXiv:1707.06347, arXiv:1506.02438: a critic, and no group.
    "ppo": {"adv_estimator": "gae", "loss_mode": "vanilla", "use_kl_loss": False},
    # arXiv:2402.03300 sec. 4.1 and 4.2.
    "grpo": {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": True,
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": True,
        "kl_loss_coef": 0.04,
        "kl_loss_type": "low_var_kl",
    },
    # arXiv:2503.20783 sec. 3.2.
    "dr_grpo": {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": False,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "use_kl_loss": False,
    },
    # arXiv:2503.14476 sec. 3 and 4.1.
    "dapo": {
        "adv_estimator": "grpo",
        "loss_agg_mode": "token-mean",
        "use_kl_loss": False,
        "filter_groups.enable": True,
        "overlong.enable": True,
        **DAPO_CLIP,
    },
    # arXiv:2504.05118 sec. 4.
    "vapo": {
        "adv_estimator": "gae",
        "loss_agg_mode": "token-mean",
        "positive_nll_coef": 0.1,
        **DAPO_CLIP,
    },
    # arXiv:2507.18071.
    "gspo": {
        "adv_estimator": "grpo",
        "loss_mode": "gspo",
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": False,
    },
    # arXiv:2402.14740.
    "rloo": {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_penalty": "kl"},
    # arXiv:2501.03262.
    "reinforce_plus_plus": {
        "adv_estimator": "reinforce_plus_plus",
        "use_kl_in_reward": True,
        "kl_penalty": "kl",
    },
    # arXiv:2310.10505.
    "remax": {"adv_estimator": "remax", "use_kl_in_reward": True},
    # arXiv:2409.06957.
    "pf_ppo": {
        "adv_estimator": "gae",
        "pf_ppo.enable": True,
        "pf_ppo.reweight_method": "max_random",
    },
    # arXiv:2106.09685 with GRPO.
    "lora_grpo": {"adv_estimator": "grpo", "use_kl_loss": True},
}
"""What holds of an algorithm in every size, below `rl.algorithm`."""

PAPERS: dict[str, dict[str, Any]] = {
    # verl's quickstart.
    "ppo_qwen2.5_0.5b": {
        "rl.optimizer.lr": 1e-6,
        "rl.critic.optimizer.lr": 1e-5,
        "rl.batch_size_prompts": 256,
        "rl.algorithm.kl_ctrl.kl_coef": 0.001,
        "target.value": 0.567,
    },
    # arXiv:2402.03300 sec. 4.2 and table 5.
    "grpo_deepseek_math_7b": {
        "rl.optimizer.lr": 1e-6,
        "rl.group_size": 64,
        "rl.mini_batch_size_prompts": None,
        "rl.sampling.max_new_tokens": 1024,
        "target.value": 0.882,
    },
    # arXiv:2503.20783, and the script of its authors.
    "dr_grpo_qwen2.5_math_7b": {
        "rl.optimizer.lr": 1e-6,
        "rl.batch_size_prompts": 128,
        "rl.group_size": 8,
        "rl.sampling.max_new_tokens": 3000,
        "target.value": 0.433,
    },
    # arXiv:2503.14476 sec. 4.1.
    "dapo_qwen2.5_32b": {
        "rl.optimizer.lr": 1e-6,
        "rl.batch_size_prompts": 512,
        "rl.group_size": 16,
        "rl.mini_batch_size_prompts": 32,
        "rl.sampling.max_new_tokens": 20480,
        "rl.algorithm.overlong.buffer_length": 4096,
        "rl.algorithm.overlong.penalty_factor": 1.0,
        "rl.reward.function": "math_dapo",
        "evaluation.top_p": 0.7,
        "target.value": 0.50,
    },
    # arXiv:2504.05118 sec. 4 and 5.
    "vapo_qwen2.5_32b": {
        "rl.optimizer.lr": 1e-6,
        "rl.critic.optimizer.lr": 2e-6,
        "rl.critic.num_warmup_steps": 50,
        "rl.algorithm.options": {
            "lam_critic": 1.0,
            "length_adaptive_alpha": 0.05,
            "bootstrap_truncated": False,
        },
        "target.value": 0.604,
    },
    # arXiv:2507.18071 sec. 5.1.
    "gspo_qwen3_30b_a3b": {
        "rl.algorithm.clip_ratio_low": 3e-4,
        "rl.algorithm.clip_ratio_high": 4e-4,
        "target.value": None,
    },
    "rloo_mixtral_8x22b": {"rl.optimizer.lr": 1e-6, "target.value": 0.923},
    # arXiv:2501.03262 table 1, first version.
    "reinforce_plus_plus_llama3_8b": {
        "rl.optimizer.lr": 5e-7,
        "rl.batch_size_prompts": 256,
        "rl.mini_batch_size_prompts": 32,
        "rl.algorithm.kl_ctrl.kl_coef": 0.001,
    },
    "remax_qwen2.5_7b": {"rl.optimizer.lr": 1e-6, "target.value": 0.97},
    # arXiv:2409.06957 states its figures for reward models of its own.
    "pf_ppo_qwen1.5_7b": {"rl.group_size": 4, "target.value": None},
    "lora_grpo_qwen2.5_0.5b": {"training.lora.rank": 32, "target.value": 0.543},
}
"""Numbers of a published size."""


def value_at(recipe: Recipe, path: str) -> Any:
    """The value of a dotted path."""
    place: Any = recipe
    for key in path.split("."):
        place = getattr(place, key)
    return place


def test_every_algorithm_ships_in_both_sizes() -> None:
    assert {*CPU, *PUBLISHED} <= set(shipped_names(RECIPES_DIR))
    assert set(PAPERS) == set(PUBLISHED)
    for small, published in zip(CPU, PUBLISHED, strict=True):
        assert published.startswith(f"{small}_")


@pytest.mark.parametrize("name", [*CPU, *PUBLISHED])
def test_it_plans_every_stage_without_a_network(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name).model_copy(update={"hardware": KNOWN})
    planner = Planner(LocalStorage(tmp_path / "store"), recipe.seed, {})
    run_stages(recipe, planner, lambda _: None)
    labels = [stage.label for stage in planner.stages]
    assert planner.stages[0].fingerprint
    assert labels[-3:] == ["merge", "evaluate", "promote"]
    assert labels.count("rl_round_1") == 1
    assert ("sft" in labels) is (name in CPU)


@pytest.mark.parametrize(("small", "published"), [*zip(CPU, PUBLISHED, strict=True)])
def test_both_sizes_are_the_algorithm_of_the_paper(small: str, published: str) -> None:
    for recipe in (load_recipe(small), load_recipe(published)):
        for path, value in ALGORITHMS[small].items():
            assert value_at(recipe, f"rl.algorithm.{path}") == value, f"{recipe.name} {path}"
        assert (recipe.rl.critic is not None) is (small in {"ppo", "vapo", "pf_ppo"})
        assert (recipe.training.lora is not None) is (small == "lora_grpo")


@pytest.mark.parametrize("name", PAPERS)
def test_a_published_size_has_the_numbers_of_the_paper(name: str) -> None:
    recipe = load_recipe(name)
    assert {path: value_at(recipe, path) for path in PAPERS[name]} == PAPERS[name]


DIFFERENT_START = {"ppo": {"data", "sft"}, "pf_ppo": set[str](), "lora_grpo": {"sft"}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_says_what_it_must_reach(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.target is not None
    assert re.search(r"arXiv:\d{4}\.\d{5}|docs/algo", recipe.target.source)
    assert recipe.promote.metric == recipe.target.metric
    assert recipe.promote.min_value == (recipe.target.value or 0.0)


def test_all_but_three_share_data_and_sft_with_the_quickstart() -> None:
    """An adapter learns otherwise; the critic of PPO needs prompts that differ."""
    quickstart = load_recipe("quickstart")
    for name in CPU:
        recipe = load_recipe(name)
        is_same = PreprocessStageConfig.from_recipe(recipe) == PreprocessStageConfig.from_recipe(
            quickstart
        )
        assert is_same is (name not in {"ppo", "pf_ppo"})
        assert (SFTStageConfig.from_recipe(recipe) == SFTStageConfig.from_recipe(quickstart)) is (
            name not in DIFFERENT_START
        )
        assert recipe.evaluation == quickstart.evaluation


@pytest.mark.parametrize("name", CPU)
def test_a_small_recipe_states_only_what_its_algorithm_is(name: str) -> None:
    text = (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    stated = set(yaml.safe_load(text))
    others = DIFFERENT_START.get(name, set())
    assert stated <= {"extends", "name", "rl", "promote", "training", *others}
    assert "arXiv:" in text


def test_a_target_changes_neither_the_run_nor_a_stage() -> None:
    name = "ppo_qwen2.5_0.5b"
    recipe, other = load_recipe(name), load_recipe(name, ["target.value=0.6"])
    assert recipe.run_name == other.run_name
    assert stages_of(recipe) == stages_of(other)
