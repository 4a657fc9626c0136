"""Whom a model has to beat, asked of a real tracker; and what is said where that is not known."""

import json
from pathlib import Path

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from engines.config.plugins import register_plugin
from flows.recipe.recipe import Recipe, load_recipe
from flows.run.registry import Registry, open_tracker
from infra.errors import ConfigError, ServiceError
from infra.store.stage_spec import Artifact
from infra.store.storage import LocalStorage
from infra.tracking.tracker import ModelCandidate

register_plugin("tracker", "json-lines", "rlhf.testing.json_lines_tracker:JsonLinesTracker")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(
        "quickstart", [f"location={{home: {tmp_path}, tracker: json-lines}}", "promote.alias=best"]
    )


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def model(storage: LocalStorage, directory: Path, name: str) -> Artifact:
    (directory / name).mkdir()
    (directory / name / "config.json").write_text(json.dumps({"name": name}))
    return storage.publish(directory / name, "model")


def register(recipe: Recipe, artifact: Artifact, beat: Artifact | None = None) -> None:
    tracker = open_tracker(recipe.location)
    candidate = ModelCandidate("quickstart", "best", artifact, recipe.home, "", {}, beat)
    tracker.register(candidate)


def registry_of(recipe: Recipe, storage: LocalStorage) -> Registry:
    return Registry(recipe.promote, open_tracker(recipe.location), storage)


def test_without_an_incumbent_there_is_nobody_to_beat(
    recipe: Recipe, storage: LocalStorage, tmp_path: Path
) -> None:
    assert registry_of(recipe, storage).incumbent(model(storage, tmp_path, "a")) is None
    assert not (tmp_path / "runs.jsonl").exists(), "asking makes nothing"


def test_incumbent_is_the_alias_bearer_or_its_predecessor(
    recipe: Recipe, storage: LocalStorage, tmp_path: Path
) -> None:
    first, second = model(storage, tmp_path, "a"), model(storage, tmp_path, "b")
    register(recipe, first)
    assert registry_of(recipe, storage).incumbent(second) == first
    unknown = Artifact(kind="unknown", uri="", digest="")
    assert registry_of(recipe, storage).incumbent(unknown) == first, (
        "a plan asks before it is known"
    )
    assert registry_of(recipe, storage).incumbent(first) is None
    register(recipe, second, beat=first)
    assert registry_of(recipe, storage).incumbent(first) == second
    assert registry_of(recipe, storage).incumbent(second) == first
    storage_without = LocalStorage(tmp_path / "other")
    assert registry_of(recipe, storage_without).incumbent(second) is None, "nothing is decided anew"


def test_one_run_has_one_answer(recipe: Recipe, storage: LocalStorage, tmp_path: Path) -> None:
    first, second, third = (model(storage, tmp_path, name) for name in "abc")
    register(recipe, first)
    registry = registry_of(recipe, storage)
    assert registry.incumbent(third) == first
    register(recipe, second)
    assert registry.incumbent(third) == first


@pytest.mark.parametrize("digest", ["e" * 64, ""])
def test_incumbent_missing_from_the_store_is_a_one_line_error(
    recipe: Recipe, storage: LocalStorage, tmp_path: Path, digest: str
) -> None:
    register(recipe, Artifact(kind="model", uri="/elsewhere/e", digest=digest))
    with pytest.raises(ConfigError) as caught:
        registry_of(recipe, storage).incumbent(model(storage, tmp_path, "a"))
    said = str(caught.value)
    assert said.startswith("promote.alias: got 'best', which points to version 1 of quickstart (")
    assert f"/elsewhere/e); need its files in {storage.uri}" in said


def test_a_registry_that_is_away_is_told_and_asked_again(
    recipe: Recipe, storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = model(storage, tmp_path, "a")
    registry = registry_of(recipe, storage)

    def away(*_: str) -> None:
        raise ConnectionError("refused\nby 127.0.0.1")

    with monkeypatch.context() as patch:
        patch.setattr(JsonLinesTracker, "incumbent", away)
        with pytest.raises(ServiceError) as caught:
            registry.incumbent(candidate)
    assert "quickstart is best (ConnectionError: refused by 127.0.0.1); nothing is promoted" in str(
        caught.value
    )
    assert registry.incumbent(candidate) is None
