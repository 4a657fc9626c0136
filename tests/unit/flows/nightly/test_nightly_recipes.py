"""The night's flow on a real Prefect server, with pipelines that fail: it goes on and tells."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow

from flows.nightly import nightly_recipes as module
from flows.nightly.night import last_night
from flows.nightly.nightly_recipes import NotReproducedError, nightly_recipes
from flows.recipe.recipe import Recipe
from infra import env
from infra.errors import ConfigError, JobFailedError
from tests.unit.flows.prefect_api import prefect_api

pytestmark = pytest.mark.slow

RECIPE = """
name: {name}
model: {{init: random}}
data: {{arithmetic: {{num_digits: 2}}}}
hardware: {{platform: cpu, device_kind: {machine}}}
"""


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with prefect_api(tmp_path_factory.mktemp("server")):
        yield


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two recipes, a home, and a pipeline whose job always fails."""

    @flow(name="rlhf-pipeline")
    def rlhf_pipeline(recipe: Recipe) -> None:
        raise JobFailedError(f"the job of {recipe.name} ended\nwithout its output")

    monkeypatch.setattr(module, "rlhf_pipeline", rlhf_pipeline)
    before = env.RLHF_HOME.get()
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    names = ["one", "two"]
    for name in names:
        text = RECIPE.format(name=name, machine=platform.machine())
        (tmp_path / f"{name}.yaml").write_text(text)
    yield [str(tmp_path / f"{name}.yaml") for name in names]
    env.set_for_process("RLHF_HOME", before)  # preflight set it to the night's


def last_run() -> FlowRun:
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=["nightly-recipes"]))
        return max(client.read_flow_runs(flow_filter=named), key=lambda run: str(run.created))


def test_a_failure_ends_no_night(
    tmp_path: Path, recipes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str, str]] = []

    def note(event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
        events.append((event, resource["prefect.resource.id"], payload["word"]))

    monkeypatch.setattr(module, "emit_event", note)
    with pytest.raises(NotReproducedError, match="not reproduced: one, two"):
        nightly_recipes(recipes, str(tmp_path / "baselines"))
    night = last_night(tmp_path / "home")
    assert [each.verdict.word for each in night.outcomes] == ["fail", "fail"]
    told = "preprocess: the job of one ended without its output"
    assert night.outcomes[0].verdict.problems == (told,)
    assert events == [
        ("rlhf.nightly.failed", f"rlhf.nightly.{name}", "fail") for name in ("one", "two")
    ]
    run = last_run()
    assert run.state is not None
    assert run.state.is_failed()
    assert night.name.endswith(str(run.id)[:8])


def test_a_cancelled_night_stops_the_jobs_of_its_recipes(
    tmp_path: Path, recipes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    def note(of: Flow[..., Any], child: FlowRun, state: object) -> None:
        stopped.append(child.parameters["recipe"]["location"]["store"])

    with pytest.raises(NotReproducedError):
        nightly_recipes(recipes, str(tmp_path / "baselines"))
    monkeypatch.setattr(module, "stop_jobs", note)
    run = last_run()
    assert run.state is not None
    [hook] = nightly_recipes.on_cancellation_hooks
    hook(nightly_recipes, run, run.state)
    stores = tmp_path / "home" / "nightly" / last_night(tmp_path / "home").name / "stores"
    assert sorted(stopped) == [str(stores / "one"), str(stores / "two")]


def test_a_damaged_baseline_ends_a_night_before_it_begins(
    tmp_path: Path, recipes: list[str]
) -> None:
    baselines = tmp_path / "baselines"
    baselines.mkdir()
    (baselines / "two.json").write_text("[]")
    with pytest.raises(ConfigError, match="two.json"):
        nightly_recipes(recipes, str(baselines))
    assert not (tmp_path / "home" / "nightly").exists()
