"""What a recipe names on the hub has one commit, and the commit is what counts."""

import json
import shutil
from pathlib import Path

import pytest

from engines.checkpoint.model_directory import create_random_model
from engines.config.algorithm import RewardConfig
from engines.config.distillation import DistillationConfig
from engines.config.look import Look
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.jobs.preflight import look as preflight
from flows.preflight import look_of
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError
from tasks.runner.identity import stage_request

Questions = list[tuple[object, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Questions:
    """Questions to a hub whose branches move with each answer."""
    asked: Questions = []

    def hub_commit(*question: object) -> str:
        asked.append(question)
        return f"{len(asked):040x}"

    monkeypatch.setattr(preflight, "hub_commit", hub_commit)
    return asked


def gsm8k() -> Look:
    look = look_of(load_recipe("gsm8k_qwen2.5_0.5b"))
    assert look is not None
    return look


def test_each_repository_is_asked_for_once(asked: Questions) -> None:
    seen = preflight.look(gsm8k())
    assert asked == [
        ("openai/gsm8k", "dataset", None, "data.sft.0"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "model", None, "model"),
    ]
    sources = (*seen.data.sft, *seen.data.rl, *seen.data.evaluation)
    assert {source.revision for source in sources} == {f"{1:040x}"}
    assert seen.model.revision == f"{2:040x}"


def test_a_moved_branch_is_another_stage(asked: Questions) -> None:
    planned = [
        stage_request(PreprocessStageConfig(data=seen.data, model=seen.model), 0).fingerprint
        for seen in (preflight.look(gsm8k()) for _ in range(2))
    ]
    assert len(set(planned)) == len(asked) / 2 == 2


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("solution, answer", "solution"),
        ("data_source, solution_str, ground_truth", "extra_info"),
        ("judge, **_", "judge"),
    ],
)
def test_a_reward_with_other_arguments_needs_no_row_to_be_refused(
    tmp_path: Path, signature: str, said: str
) -> None:
    """Findings VIII 1: where the data is the hub's, there is no row to try it on."""
    (tmp_path / "score.py").write_text(f"def score({signature}):\n    return 1.0\n")
    reward = RewardConfig(function=f"{tmp_path}/score.py:score")
    with pytest.raises(ConfigError, match=f"raised TypeError: .*{said}.*called with") as told:
        preflight.look_at_reward(reward, None)
    assert "\n" not in str(told.value)


def taught(model: Path, **teacher: object) -> Look:
    recipe = load_recipe(
        "quickstart",
        [f"model={{init: pretrained, path: {model}, max_length: 32}}", "data.max_prompt_length=16"],
    )
    section = DistillationConfig.model_validate({"num_top": 4, **teacher})
    look = look_of(
        recipe.model_copy(update={"rl": recipe.rl.model_copy(update={"distillation": section})})
    )
    assert look is not None
    return look


def write_model(directory: Path, characters: str) -> Path:
    tokenizer = train_tokenizer(
        TokenizerConfig(), [characters], directory / "tokenizer", max_length=32, chat_template=None
    )
    create_random_model(ArchitectureConfig(num_layers=1), tokenizer, 32, 1, directory / "model")
    return directory / "model"


def test_a_teacher_of_other_tokens_is_refused_before_anything_runs(tmp_path: Path) -> None:
    student = write_model(tmp_path / "student", "0123456789+= user assistant")
    other = write_model(tmp_path / "teacher", "abcdefghij+= user assistant")
    with pytest.raises(ConfigError, match="a teacher whose tokenizer has .* need one") as found:
        preflight.look(taught(student, path=str(other)))
    assert found.value.path == "rl.distillation.path"
    with pytest.raises(ConfigError, match="got 1000; need at most the vocabulary") as found:
        preflight.look(taught(student, path=str(student), num_top=1000))
    assert found.value.path == "rl.distillation.num_top"
    with pytest.raises(ConfigError) as found:
        preflight.look(taught(student, path=str(tmp_path)))
    assert found.value.path.startswith("rl.distillation")
    preflight.look(taught(student, path=str(student)))


def test_a_teacher_of_the_hub_has_one_commit(asked: Questions, tmp_path: Path) -> None:
    student = write_model(tmp_path, "0123456789+= user assistant")
    seen = preflight.look(taught(student, path="owner/teacher"))
    assert asked == [("owner/teacher", "model", None, "rl.distillation")]
    assert seen.teacher is not None
    assert seen.teacher.revision == f"{1:040x}"


def test_a_teacher_has_to_be_one_that_the_ranks_compute(tmp_path: Path) -> None:
    student = write_model(tmp_path, "0123456789+= user assistant")
    teacher = tmp_path / "teacher"
    shutil.copytree(student, teacher)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "model_type": "doge"}))
    with pytest.raises(ConfigError, match="a doge model with a mask") as found:
        preflight.look(taught(student, path=str(teacher)))
    assert found.value.path == "rl.distillation.path"
