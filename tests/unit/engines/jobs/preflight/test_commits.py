"""What a recipe names on the hub has one commit, and the commit is what counts."""

from pathlib import Path

import pytest

from engines.config.preflight_request import PreflightRequest
from engines.config.stages.data import PreprocessStageConfig
from engines.jobs.preflight import run
from engines.jobs.preflight.run import check_request
from flows.preflight import request_of
from flows.recipe.recipe import load_recipe
from tasks.runner.run import stage_request
from tests.unit.engines.jobs.preflight.test_other_models import taught, write_model

Questions = list[tuple[object, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Questions:
    """Questions to a hub whose branches move with each answer."""
    asked: Questions = []

    def hub_commit(*question: object) -> str:
        asked.append(question)
        return f"{len(asked):040x}"

    monkeypatch.setattr(run, "hub_commit", hub_commit)
    return asked


def gsm8k() -> PreflightRequest:
    found = request_of(load_recipe("gsm8k_qwen2.5_0.5b"))
    assert found is not None
    return found


def test_each_repository_is_asked_for_once(asked: Questions) -> None:
    seen = check_request(gsm8k())
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
        for seen in (check_request(gsm8k()) for _ in range(2))
    ]
    assert len(set(planned)) == len(asked) / 2 == 2


def test_a_teacher_of_the_hub_has_one_commit(asked: Questions, tmp_path: Path) -> None:
    student = write_model(tmp_path, "0123456789+= user assistant")
    seen = check_request(taught(student, path="owner/teacher"))
    assert asked == [("owner/teacher", "model", None, "rl.distillation")]
    assert seen.teacher is not None
    assert seen.teacher.revision == f"{1:040x}"
