"""A run that fails leaves its recipe and a diagnosis; one that somebody ends leaves none."""

import json
from pathlib import Path

import pytest

from flows.recipe.recipe import LocationConfig, Recipe, load_recipe
from flows.run.pipeline_run import SURROUNDINGS, SilentObserver, Surroundings, open_run
from infra.errors import JobFailedError
from infra.store.storage import LocalStorage
from infra.store.work_channel import JobProblem
from tasks.runner.identity import StageRequest
from tests.unit.flows.test_plan import RUN, Stages


class Heard(SilentObserver):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def message(self, label: str, text: str) -> None:
        self.said[label] = text


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    hardware = "hardware={platform: cpu, device_kind: x86_64}"
    location = LocationConfig(home=str(tmp_path / "home"))
    loaded = load_recipe("quickstart", [hardware, "diagnosis.max_kl=0.25"])
    return loaded.model_copy(update={"location": location})


def fail(recipe: Recipe, error: BaseException) -> None:
    """A run of one stage, whose job has no memory."""
    request = StageRequest(recipe.preprocess_stage(), {}, 0)
    with open_run(recipe, {}, ()) as run:
        storage = LocalStorage(Path(recipe.store_uri))
        with pytest.raises(InterruptedError):
            Stages(storage, fails=request.label).run(request)
        problem = JobProblem(type="X", message="m", exit_code=1, cause="out_of_memory")
        storage.channel(request.fingerprint).write_error(0, problem)
        own = [path.name for path in (recipe.home / "store" / "runs").iterdir()]
        storage.runs.use(next(key for key in own if key != RUN), request.fingerprint)
        assert run.gate.rejected == {}
        raise error


def end(recipe: Recipe, error: BaseException) -> Heard:
    heard = Heard()
    token = SURROUNDINGS.set(Surroundings(heard))
    try:
        with pytest.raises(type(error)):
            fail(recipe, error)
    finally:
        SURROUNDINGS.reset(token)
    return heard


def test_a_run_that_fails_is_diagnosed(recipe: Recipe) -> None:
    heard = end(recipe, JobFailedError("preprocess: job x: X: m"))
    directory = recipe.home / "runs" / recipe.run_name
    page = directory / "diagnosis.html"
    assert heard.said == {"diagnosis": f"{recipe.run_name}: out_of_memory (preprocess): {page}"}
    assert "out_of_memory" in page.read_text()
    assert json.loads((directory / "recipe.json").read_text())["diagnosis"]["max_kl"] == 0.25


def test_a_run_that_somebody_ends_is_not(recipe: Recipe) -> None:
    assert end(recipe, KeyboardInterrupt()).said == {}
    assert not list((recipe.home / "runs").glob("*/diagnosis.html"))


def test_what_cannot_be_diagnosed_does_not_hide_the_error(recipe: Recipe) -> None:
    page = recipe.home / "runs" / recipe.run_name / "diagnosis.html"
    page.mkdir(parents=True)
    heard = end(recipe, JobFailedError("the cause"))
    assert heard.said["diagnosis"].startswith("none: ")
