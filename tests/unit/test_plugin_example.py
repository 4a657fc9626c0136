"""The example plugin: one file and one row is all that a part of each kind takes."""

import importlib
import sys
from pathlib import Path

import pytest

from engines.config.algorithm import AlgorithmConfig, RewardConfig
from engines.config.options import check_backend, check_parts, check_reward
from engines.config.plugins import TABLES, named_rows, plugin_modules
from engines.config.training import TrainingConfig
from flows.recipe.recipe import load_recipe
from flows.stage_order import stages_of
from infra.errors import ConfigError

EXAMPLE = Path(__file__).parents[1] / "plugin_example"
NAMES = {
    "platform": "example_chip",
    "backend": "example_engine",
    "rollout": "example_rollout",
    "adv_estimator": "example_advantage",
    "loss_mode": "example_loss",
    "kl_loss_type": "example_kl",
    "reward": "example_reward",
    "preprocessor": "flashcards",
    "tracker": "example_tracker",
}
RECIPE = [
    "training.backend=example_engine",
    "rollout.engine=example_rollout",
    "rl.algorithm.adv_estimator=example_advantage",
    "rl.algorithm.loss_mode=example_loss",
    "rl.algorithm.kl_loss_type=example_kl+",
    "rl.reward.function=example_reward",
]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setattr("infra.plugins._registered", [])
    monkeypatch.delitem(sys.modules, "example_chip.register", raising=False)
    monkeypatch.setenv("RLHF_USE_EXTERNAL_MODULES", "example_chip.register")


@pytest.mark.parametrize("kind", NAMES)
def test_a_part_of_each_kind_is_found_and_loads(kind) -> None:
    name = NAMES[kind]
    row = TABLES[kind].find(name)
    assert row.registrar == "example_chip.register"
    assert callable(TABLES[kind].load(name))
    known = {row.module, "example_chip.register"}
    options = {row.options.partition(":")[0]} if row.options else set()
    assert plugin_modules([(kind, name)]) == tuple(sorted(known | options))


def test_a_recipe_names_them_all_and_their_options_are_validated() -> None:
    recipe = load_recipe("quickstart", [*RECIPE, "rl.algorithm.options.max_ratio=3"])
    named = {row.name for stage in stages_of(recipe) for row in named_rows(stage.plugins())}
    assert set(NAMES.values()) - named == {"example_chip", "flashcards", "example_tracker"}
    with pytest.raises(ConfigError, match=r"options.max_ratio: got 1; need a finite number > 1"):
        load_recipe("quickstart", [*RECIPE, "rl.algorithm.options.max_ratio=1"])
    with pytest.raises(ConfigError, match=r"rl.group_size: got 1; example_advantage needs >= 2"):
        load_recipe("quickstart", [*RECIPE, "rl.group_size=1"])
    options = TrainingConfig(backend="example_engine", options={"bucket_size": 1})
    with pytest.raises(ConfigError, match="training.options.bucket_size: .*mean bucket_size_mb"):
        check_backend(options)


def test_facts_need_no_part() -> None:
    importlib.import_module("example_chip.register")
    sys.modules.pop("example_chip.algorithm", None)
    algorithm = AlgorithmConfig(adv_estimator="example_advantage", loss_mode="example_loss")
    assert check_parts(algorithm).group_relative
    assert check_reward(RewardConfig(function="example_reward")) is not None
    assert "example_chip.algorithm" not in sys.modules
