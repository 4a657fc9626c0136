"""A run that fails leaves its recipe and a diagnosis; one that somebody ends leaves none.

A rejected round is told when it is rejected.
"""

import json
import logging
from collections.abc import Collection
from pathlib import Path

import pytest
from prefect import flow

from engines.config.recipe import LocationConfig
from engines.config.stages.data import PreprocessStageConfig
from flows.recipe.recipe import Recipe, load_recipe
from flows.run.pipeline_run import RUN_CONTEXT, LazyCluster, RunContext, open_run
from flows.stage_order import run_stages
from infra.errors import JobFailedError
from infra.store.storage import LocalStorage
from infra.store.work_channel import JobProblem
from tasks.runner.recorder import Recorder
from tasks.runner.run import StageRequest, StageResult
from tasks.runner.stage import StageObserver
from tests.unit.flows.prefect_api import prefect_api
from tests.unit.flows.run.test_round_gate import Training
from tests.unit.flows.test_plan import RUN, Stages

REJECTED = (
    "rejected: entropy_collapse: the policy's entropy fell to 2% of what it was, "
    "and answers still differ in score: it explores no more; "
    "what follows takes the policy of rl_round_1"
)


class Heard(StageObserver):
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
    request = StageRequest(PreprocessStageConfig.from_recipe(recipe), {}, 0)
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
    token = RUN_CONTEXT.set(RunContext(heard))
    try:
        with pytest.raises(type(error)):
            fail(recipe, error)
    finally:
        RUN_CONTEXT.reset(token)
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


def test_run_records_external_inputs_before_any_stage_runs(recipe: Recipe) -> None:
    path = Path(recipe.store_uri, "artifacts", "model", "0f" * 32)
    model = recipe.model.model_copy(update={"path": str(path)})
    recipe = recipe.model_copy(update={"model": model})
    with open_run(recipe, {}, ()):
        [known] = LocalStorage(Path(recipe.store_uri)).runs.known()
    assert (known.name, {*known.read_at}, known.used_at) == (recipe.run_name, {path.name}, {})


class Interrupted(LazyCluster):
    """Ctrl-C comes while it is released."""

    def release(self, besides: Collection[str] = ()) -> None:
        super().release(besides)
        raise KeyboardInterrupt


def test_a_run_that_is_ended_at_its_very_end_is_told_as_finished(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Recorder] = []
    close = Recorder.close
    monkeypatch.setattr(Recorder, "close", lambda self: (close(self), closed.append(self)))
    token = RUN_CONTEXT.set(RunContext(Heard(), Interrupted(recipe.home)))
    try:
        with pytest.raises(KeyboardInterrupt), open_run(recipe):
            pass
    finally:
        RUN_CONTEXT.reset(token)
    assert len(closed) == 1


class Watched(Training):
    """Remembers what had been said when a stage was asked for."""

    def __init__(self, storage: LocalStorage, heard: Heard) -> None:
        super().__init__(storage)
        self.heard, self.said_before = heard, dict[str, dict[str, str]]()

    def run(self, request: StageRequest) -> StageResult:
        self.said_before[request.label] = dict(self.heard.said)
        return super().run(request)


def rejecting(recipe: Recipe) -> Watched:
    """A run of three rounds, of which the second is rejected."""
    gate = recipe.diagnosis.model_copy(
        update={"window_num_steps": 2, "reject_round": ("entropy_collapse",)}
    )
    rl = recipe.rl.model_copy(update={"num_rounds": 3})
    recipe = recipe.model_copy(update={"diagnosis": gate, "rl": rl})
    heard = Heard()
    token = RUN_CONTEXT.set(RunContext(heard))
    try:
        with open_run(recipe, {}, ()) as run:
            stages = Watched(LocalStorage(Path(recipe.store_uri)), heard)
            run_stages(recipe, stages, lambda _: None, run.gate.accepts)
    finally:
        RUN_CONTEXT.reset(token)
    return stages


def test_a_rejected_round_is_told_before_the_next_stage_begins(
    recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    stages = rejecting(recipe)
    assert stages.said_before["evaluate_rl_round_2"] == {}
    assert stages.said_before["rl_round_3"] == {"rl_round_2": f"warning: {REJECTED}"}
    assert stages.heard.said == {"rl_round_2": f"warning: {REJECTED}"}
    assert [each.getMessage() for each in caplog.records if each.name.startswith("flows")] == [
        f"rl_round_2  {REJECTED}"
    ]


@pytest.mark.slow
def test_a_rejected_round_is_told_in_the_log_of_the_flow_run(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rejecting_flow = flow(rejecting)
    logger = logging.getLogger("prefect.flow_runs")
    logger.addHandler(caplog.handler)
    try:
        with prefect_api(tmp_path):
            rejecting_flow(recipe)
    finally:
        logger.removeHandler(caplog.handler)
    told = [each for each in caplog.records if "rejected" in each.getMessage()]
    assert {(each.levelname, each.getMessage()) for each in told} == {
        ("WARNING", f"rl_round_2  {REJECTED}")
    }
