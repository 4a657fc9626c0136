"""What a recipe names on the hub has one commit, and the commit is what counts."""

from pathlib import Path

import pytest

from engines.config.algorithm import RewardConfig
from engines.config.look import Look
from engines.config.stages import PreprocessStageConfig
from engines.jobs import preflight
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
