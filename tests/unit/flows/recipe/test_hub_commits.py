"""What a recipe names on the hub has one commit, and the commit is what counts."""

import pytest

from flows.recipe import hub_commits
from flows.recipe.hub_commits import with_hub_commits
from flows.recipe.recipe import Recipe, load_recipe
from tasks.runner.identity import stage_request


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Questions to a hub whose branches move with each answer."""
    asked: list[tuple[object, ...]] = []

    def hub_commit(*question: object) -> str:
        asked.append(question)
        return f"{len(asked):040x}"

    monkeypatch.setattr(hub_commits, "hub_commit", hub_commit)
    return asked


def gsm8k(*overrides: str) -> Recipe:
    return load_recipe("gsm8k_qwen2.5_0.5b", overrides)


def test_each_repository_is_asked_for_once(asked: list[tuple[object, ...]]) -> None:
    recipe = with_hub_commits(gsm8k())
    assert asked == [
        ("openai/gsm8k", "dataset", None, "data.sft.0"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "model", None, "model"),
    ]
    data = recipe.data
    of_data = {source.revision for source in (*data.sft, *data.rl, *data.evaluation)}
    assert (of_data, recipe.model.revision) == ({f"{1:040x}"}, f"{2:040x}")
    for stage in (recipe.sft_stage(), recipe.rl_round_stage(1), recipe.preprocess_stage()):
        assert stage.model.revision == recipe.model.revision


def test_a_moved_branch_is_another_stage(asked: list[tuple[object, ...]]) -> None:
    planned = [stage_request(with_hub_commits(gsm8k()).preprocess_stage(), 0) for _ in range(2)]
    assert planned[0].fingerprint != planned[1].fingerprint


def test_what_is_no_hub_id_is_not_asked_for(asked: list[tuple[object, ...]]) -> None:
    assert with_hub_commits(load_recipe("quickstart")) == load_recipe("quickstart")
    assert asked == []
