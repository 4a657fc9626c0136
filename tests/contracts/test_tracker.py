"""The contract of a tracker: run it on your own.

    pytest --pyargs rlhf.testing.test_tracker --tracker mine --tracker-uri http://... \
        --tracker-reader my_tests:read_run

The reader gets `(tracker, run_id)` and gives `{"state", "parent", "tags", "metrics"}`, metrics as
sorted `(name, step, value)`; without one, only what the tracker itself answers is tested.
Covered: making one is free; a run is found again by its key; points, states and models sent twice
are there once; positions survive the process. Not covered: how it looks.
"""

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from engines.config.plugins import TRACKERS, register_plugin
from infra.store.stage_spec import Artifact
from infra.tracking.tracker import (
    Incumbent,
    MetricPoint,
    ModelCandidate,
    TrackedRun,
    Tracker,
    TrackerRefusedError,
    TrackerSettings,
)

register_plugin("tracker", "json-lines", "rlhf.testing.json_lines_tracker:JsonLinesTracker")

Read = Callable[[Any, str], dict[str, Any]]
POINTS = [MetricPoint("train/loss", 1.0 / step, step, 1000 + step) for step in range(1, 6)]


def read_mlflow(tracker: Any, run_id: str) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracker.uri)
    run = client.get_run(run_id)
    histories = (client.get_metric_history(run_id, name) for name in run.data.metrics)
    return {
        "state": run.info.status,
        "parent": run.data.tags.get("mlflow.parentRunId"),
        "tags": {k.removeprefix("rlhf."): v for k, v in run.data.tags.items()},
        "metrics": sorted((m.key, m.step, m.value) for history in histories for m in history),
    }


READERS: dict[str, Read] = {"mlflow": read_mlflow, "json-lines": JsonLinesTracker.run}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One tracker by `--tracker`, else those of this project."""
    if "name" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--tracker", default=None)
        metafunc.parametrize("name", [asked] if asked else list(READERS), scope="module")


@pytest.fixture(scope="module")
def make(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Tracker]:
    """A tracker as another process would make it: of the same service, knowing nothing."""
    home = tmp_path_factory.mktemp("tracker")
    uri = request.config.getoption("--tracker-uri", default=None)
    # The address of whoever runs the tests is not that of the test.
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    return lambda: TRACKERS.load(name)(TrackerSettings(home, uri, "contract"))


@pytest.fixture(scope="module")
def read(name: str, request: pytest.FixtureRequest) -> Read:
    target = request.config.getoption("--tracker-reader", default=None)
    if target:
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name not in READERS:
        pytest.skip("needs --tracker-reader")
    return READERS[name]


def test_making_one_imports_nothing_heavy_and_writes_nothing(name: str, tmp_path: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from infra.tracking.tracker import *; "
        "from engines.config.plugins import TRACKERS, register_plugin; "
        "register_plugin('tracker', 'json-lines', "
        "'rlhf.testing.json_lines_tracker:JsonLinesTracker'); "
        f"t = TRACKERS.load({name!r})(TrackerSettings(Path({str(tmp_path)!r}))); "
        "heavy = {'mlflow', 'wandb', 'torch', 'pandas', 'sqlalchemy'} & set(sys.modules); "
        "print(json.dumps([t.address, t.is_absent(), sorted(heavy)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    address, _, heavy = json.loads(done.stdout)
    assert address
    assert heavy == []
    assert list(tmp_path.iterdir()) == []


def test_one_service_has_one_address_and_one_origin(make: Callable[[], Tracker]) -> None:
    assert make().address == make().address
    assert make().origin() == make().origin()
    assert not make().is_absent()


def test_a_run_is_found_by_its_key_from_anywhere(make: Callable[[], Tracker], read: Read) -> None:
    tracker = make()
    parent = tracker.open_run(TrackedRun("p" * 8, "run", params={"rl": {"lr": 1e-6}}))
    child = TrackedRun(
        "c" * 8, "sft", parent, {"a": {"b": "z" * 9000}}, {"stage": "sft"}, {"data": "d" * 64}
    )
    run_id = tracker.open_run(child)
    assert run_id != parent
    assert make().open_run(child) == tracker.open_run(child) == run_id
    with ThreadPoolExecutor(4) as pool:
        same = TrackedRun("t" * 8, "at once")
        assert len(set(pool.map(lambda _: make().open_run(same), range(4)))) == 1
    seen = read(tracker, run_id)
    assert (seen["state"], seen["parent"]) == ("RUNNING", parent)
    assert seen["tags"]["stage"] == "sft"


def test_points_sent_twice_are_there_once(make: Callable[[], Tracker], read: Read) -> None:
    tracker = make()
    run_id = tracker.open_run(TrackedRun("m" * 8, "metrics"))
    assert tracker.position(run_id) == ""
    tracker.log_metrics(run_id, POINTS[:3], "3")
    tracker.log_metrics(run_id, POINTS[:3], "3")
    again = make()
    assert again.position(run_id) == "3"
    again.log_metrics(run_id, POINTS, "5")
    expected = [(p.name, p.step, p.value) for p in POINTS]
    assert read(tracker, run_id)["metrics"] == expected
    odd = [MetricPoint("odd", math.nan, 6, 1006), MetricPoint("big", math.inf, 6, 1006)]
    again.log_metrics(run_id, odd, "7")
    assert tracker.position(run_id) == "7"


def test_a_state_said_twice_is_said_once(make: Callable[[], Tracker], read: Read) -> None:
    tracker = make()
    run_id = tracker.open_run(TrackedRun("s" * 8, "states"))
    tracker.log_metrics(run_id, POINTS[:1], "1")
    headline = {"train/loss": 1.0, "accuracy": 0.5}
    for state in ("KILLED", "RUNNING", "FINISHED", "FINISHED"):
        tracker.set_state(run_id, state, {"output.digest": state}, headline)
        seen = read(tracker, run_id)
        assert (seen["state"], seen["tags"]["output.digest"]) == (state, state)
        assert seen["metrics"] == [("accuracy", 0, 0.5), ("train/loss", 1, 1.0)]


def test_a_model_is_one_version_per_digest(make: Callable[[], Tracker], tmp_path: Path) -> None:
    tracker = make()
    run_id = tracker.open_run(TrackedRun("r" * 8, "promote"))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def register(digest: str) -> str:
        artifact = Artifact(kind="model", uri=str(tmp_path), digest=digest * 64)
        candidate = ModelCandidate("m", "champion", artifact, tmp_path, run_id, {"accuracy": 0.9})
        return make().register(candidate)

    assert make().aliased() == {}
    assert [register(digest) for digest in "aab"] == ["1", "1", "2"]
    assert make().aliased() == {"b" * 64: "m@champion"}
    assert register("a") == "1"
    assert make().aliased() == {"a" * 64: "m@champion"}


def test_an_alias_leads_to_what_was_registered(make: Callable[[], Tracker], tmp_path: Path) -> None:
    tracker = make()
    run_id = tracker.open_run(TrackedRun("i" * 8, "promote"))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    first, second = (
        Artifact(kind="model", uri=str(tmp_path), digest=each * 64, fingerprint="f" * 64)
        for each in "ab"
    )

    def register(artifact: Artifact, alias: str, beat: Artifact | None) -> None:
        candidate = ModelCandidate("rivals", alias, artifact, tmp_path, run_id, {}, beat)
        make().register(candidate)

    def bearers() -> tuple[Incumbent | None, Incumbent | None]:
        return make().incumbent("rivals", "champion"), make().incumbent("rivals", "challenger")

    assert bearers() == (None, None)
    register(first, "champion", None)
    assert bearers() == (Incumbent("1", first), None)
    register(second, "challenger", None)
    assert bearers() == (Incumbent("1", first), Incumbent("2", second))
    register(second, "champion", first)
    assert bearers()[0] == Incumbent("2", second, first)


def test_files_are_kept_with_a_run(make: Callable[[], Tracker], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    tracker = make()
    run_id = tracker.open_run(TrackedRun("f" * 8, "files"))
    tracker.log_files(run_id, tmp_path, "report")
    tracker.log_files(run_id, tmp_path, "report")


def test_a_refusal_is_told_from_an_absence(make: Callable[[], Tracker]) -> None:
    with pytest.raises(TrackerRefusedError):
        make().set_state("no such run", "FINISHED", {}, {})
