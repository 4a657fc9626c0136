"""The recipe that `rlhf evaluate` makes of its arguments."""

from pathlib import Path

import pytest

from flows.commands.cli import build_parser
from flows.commands.run import evaluation_recipe, slug, suite_name
from infra.errors import ConfigError


def test_a_model_on_two_suites_beside_another(tmp_path: Path) -> None:
    file = tmp_path / "My Suite.yaml"
    file.write_text("extends: addition\n")
    recipe = evaluation_recipe(
        "Qwen/Qwen2.5-0.5B",
        ["gsm8k", str(file)],
        "models:/math@champion",
        ["suites.gsm8k.evaluation.num_samples=8", "rollout.max_num_sequences=64"],
        seed=3,
    )
    assert recipe.name == "evaluate-qwen-qwen2.5-0.5b"
    assert [*recipe.suites] == ["gsm8k", "my_suite"]
    assert recipe.suites["gsm8k"].evaluation.num_samples == 8
    assert (recipe.seed, recipe.rollout.max_num_sequences, recipe.trains) == (3, 64, False)
    assert recipe.against is not None
    assert recipe.against.path == "models:/math@champion"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("models:/quickstart@champion", "quickstart-champion"),
        ("/data/Models/LLaMA 3/", "data-models-llama-3"),
        ("..", "model"),
        (f"/{'x' * 100}/y", f"{'x' * 46}-y"),
    ],
)
def test_names_of_models_become_names_of_runs(model: str, name: str) -> None:
    assert slug(model) == name


def test_a_suite_is_called_after_its_file() -> None:
    assert [*map(suite_name, ("gsm8k", "/x/AIME 2025.yaml", "./-.yaml"))] == [
        "gsm8k",
        "aime_2025",
        "suite",
    ]


def test_two_suites_of_one_name_and_a_policy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--suite: got .*; need names that differ"):
        evaluation_recipe("owner/name", ["gsm8k", "gsm8k"])
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "trainer.json").write_text("{}")
    with pytest.raises(ConfigError, match="^MODEL: .* is a policy's checkpoint; need a model"):
        evaluation_recipe(str(tmp_path), ["gsm8k"])


def test_a_name_that_holds_a_secret_is_told_by_its_argument() -> None:
    with pytest.raises(ConfigError, match="^MODEL: secrets do not go into"):
        evaluation_recipe("hf_abcdefghijklmnopqrstuvwxyz012345", ["gsm8k"])


def test_help_names_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["evaluate", "--help"])
    assert "addition, aime_2024, gsm8k, math_500" in " ".join(capsys.readouterr().out.split())
