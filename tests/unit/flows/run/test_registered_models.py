"""Models that a recipe names by an alias, looked up in a real tracker and a real store."""

import json
from pathlib import Path

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from engines.config.plugins import register_plugin
from engines.config.recipe import MODEL_SETTINGS
from engines.config.stages.rl import RLRoundStageConfig
from flows.preflight import with_registered_models
from flows.recipe.recipe import Recipe, load_recipe
from flows.run.registry import open_tracker
from infra.errors import ConfigError, ServiceError
from infra.store.stage_spec import Artifact
from infra.store.storage import LocalStorage
from infra.tracking.tracker import ModelCandidate

register_plugin("tracker", "json-lines", "rlhf.testing.json_lines_tracker:JsonLinesTracker")
NAMED = "models:/teacher@champion"


def load(home: Path, *settings: str) -> Recipe:
    return load_recipe("quickstart", [f"location={{home: {home}, tracker: json-lines}}", *settings])


def taught(home: Path, path: str = NAMED) -> Recipe:
    return load(home, f"rl.distillation={{path: '{path}'}}")


def registered(recipe: Recipe, storage: LocalStorage, directory: Path) -> Artifact:
    (directory / "made").mkdir()
    (directory / "made" / "config.json").write_text(json.dumps({"name": "made"}))
    artifact = storage.publish(directory / "made", "model")
    candidate = ModelCandidate("teacher", "champion", artifact, recipe.home, "", {}, None)
    open_tracker(recipe.location).register(candidate)
    return artifact


def test_an_alias_is_the_directory_of_what_bears_it(tmp_path: Path) -> None:
    recipe, storage = taught(tmp_path), LocalStorage(tmp_path / "store")
    artifact = registered(recipe, storage, tmp_path)
    found = with_registered_models(recipe, storage)
    assert found.rl.distillation is not None
    assert found.rl.distillation.path == str(storage.local_copy(artifact))
    [given] = RLRoundStageConfig.from_recipe(found, 1).external_inputs(["policy"]).items()
    assert (given[0], str(given[1].path)) == ("teacher", found.rl.distillation.path)
    assert found.rl.distillation.identity_values()["path"] is None, "its bytes count"
    assert found.rl.model_copy(update={"distillation": None}) == recipe.rl.model_copy(
        update={"distillation": None}
    )


def test_an_alias_that_nothing_bears_is_told_in_one_line(tmp_path: Path) -> None:
    recipe, storage = taught(tmp_path), LocalStorage(tmp_path / "store")
    with pytest.raises(ConfigError, match="no version has that alias") as found:
        with_registered_models(recipe, storage)
    assert found.value.path == "rl.distillation.path"


def test_a_model_whose_files_are_elsewhere_is_told_in_one_line(tmp_path: Path) -> None:
    recipe = taught(tmp_path)
    registered(recipe, LocalStorage(tmp_path / "other"), tmp_path)
    with pytest.raises(ConfigError, match="which is version 1 .* need its files in"):
        with_registered_models(recipe, LocalStorage(tmp_path / "store"))


def test_a_registry_that_does_not_answer_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(JsonLinesTracker, "incumbent", away)
    with pytest.raises(ServiceError, match="does not say which version of teacher is champion"):
        with_registered_models(taught(tmp_path), LocalStorage(tmp_path / "store"))


@pytest.mark.parametrize("path", ["models:/teacher/3", "models:/teacher", "models:teacher@a"])
def test_what_begins_as_a_registered_model_has_to_be_one(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="need models:/NAME@ALIAS") as found:
        taught(tmp_path, path)
    assert found.value.path == "rl.distillation.path"


def test_relative_paths_of_models_are_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "model").mkdir(parents=True)
    path = "./a/model"
    judge = f"{{path: {path}, prompt: 'how good?'}}"
    recipe = load(
        tmp_path,
        f"model={{init: pretrained, path: {path}}}",
        f"rl.distillation={{path: {path}}}",
        f"against.path={path}",
        "rl.reward={function: mixture, components: {a: {function: model}, b: {function: judge}, "
        "c: {function: exact}}, accuracy: [c], "
        f"model: {{path: {path}}}, judge: {judge}}}",
    )
    assert dict(recipe.models()) == dict.fromkeys(MODEL_SETTINGS, str(tmp_path / "a" / "model"))
