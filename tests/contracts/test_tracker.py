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
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from engines.config.plugins import TRACKERS, register_plugin
from infra.errors import ConfigError
from infra.store.stage_spec import Artifact
from infra.tracking.samples import KeptSample
from infra.tracking.tracker import (
    Incumbent,
    MetricPoint,
    ModelCandidate,
    TrackedOutput,
    TrackedRun,
    Tracker,
    TrackerRefusedError,
    TrackerSettings,
)

register_plugin("tracker", "json-lines", "rlhf.testing.json_lines_tracker:JsonLinesTracker")

Read = Callable[[Any, str], dict[str, Any]]
DATA = Artifact(kind="dataset", uri="/nowhere", digest="d" * 64)
# Values that a tracker which keeps float32 gives back as they were.
POINTS = [MetricPoint("train/loss", 2.0**-step, step, 1000 + step) for step in range(5)]


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


def read_tensorboard(tracker: Any, run_id: str) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stored = tracker.run(run_id)
    events = EventAccumulator(str(tracker.points_path(run_id).parent), {"scalars": 0})
    events.Reload()
    scalars = [(tag, s) for tag in events.Tags()["scalars"] for s in events.Scalars(tag)]
    return {
        "state": stored.state,
        "parent": stored.parent,
        "tags": stored.tags,
        "metrics": sorted((tag, scalar.step, scalar.value) for tag, scalar in scalars),
    }


def read_wandb(tracker: Any, run_id: str) -> dict[str, Any]:
    """What the library wrote offline, and wrote to its end."""
    from wandb.proto.wandb_internal_pb2 import Record

    tracker.hand_over(run_id)
    history: list[tuple[str, int, float]] = []
    summary: dict[str, Any] = {}
    for path in sorted((tracker.root / run_id).glob("part-*/wandb/offline-run-*/*.wandb")):
        records = [Record.FromString(data) for data in leveldb_records(path.read_bytes())]
        assert records[-1].WhichOneof("record_type") == "exit"
        for record in records:
            step = record.history.step.num
            items = [("".join(i.nested_key) or i.key, i.value_json) for i in record.history.item]
            history += [(k, step, json.loads(v)) for k, v in items if not k.startswith("_")]
            for item in record.summary.update:
                summary["".join(item.nested_key) or item.key] = json.loads(item.value_json)
    stored = tracker.run(run_id)
    named = {name for name, _, _ in history}
    tags = [name for name in summary if name.startswith("rlhf/")]
    headlines = {k: v for k, v in summary.items() if k[0] != "_" and k not in {*named, *tags}}
    return {
        "state": stored.state,
        "parent": stored.parent,
        "tags": {**stored.tags, **{k.removeprefix("rlhf/"): summary[k] for k in tags}},
        "metrics": sorted([*history, *((name, 0, value) for name, value in headlines.items())]),
    }


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in blocks: whole (1), or in a first, middle and last piece (2, 3, 4)."""
    at, whole = 7, b""  # behind the header of the library's own
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:
            yield whole
            whole = b""


READERS: dict[str, Read] = {
    "mlflow": read_mlflow,
    "json-lines": JsonLinesTracker.run,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One tracker by `--tracker`, else those of this project."""
    if "name" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--tracker", default=None)
        metafunc.parametrize("name", [asked] if asked else list(READERS), scope="module")


@pytest.fixture(scope="module")
def make(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Tracker]]:
    """A tracker as another process would make it: of the same service, knowing nothing."""
    home = tmp_path_factory.mktemp("tracker")
    uri = request.config.getoption("--tracker-uri", default=None)
    try:
        TRACKERS.find(name)
    except ConfigError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        # The addresses in the environment of the test run are not those of the test.
        for variable in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_MODE"):
            patch.delenv(variable, raising=False)
        yield lambda: TRACKERS.load(name)(TrackerSettings(home, uri, "contract"))


@pytest.fixture(autouse=True)
def _no_service_is_left() -> Iterator[None]:
    """Weights & Biases starts a process of its own, for as long as it is not told to end."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(scope="module")
def read(name: str, request: pytest.FixtureRequest) -> Read:
    target = request.config.getoption("--tracker-reader", default=None)
    if target:
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name not in READERS:
        pytest.skip("needs --tracker-reader")
    return READERS[name]


def test_making_one_imports_nothing_heavy_and_writes_nothing(
    name: str, make: Callable[[], Tracker], tmp_path: Path
) -> None:
    code = (
        "import sys, json; from pathlib import Path; from infra.tracking.tracker import *; "
        "from engines.config.plugins import TRACKERS, register_plugin; "
        "register_plugin('tracker', 'json-lines', "
        "'rlhf.testing.json_lines_tracker:JsonLinesTracker'); "
        f"t = TRACKERS.load({name!r})(TrackerSettings(Path({str(tmp_path)!r}))); "
        "heavy = {'mlflow', 'wandb', 'tensorboard', 'torch', 'pandas', 'sqlalchemy'}; "
        "heavy &= set(sys.modules); "
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
        "c" * 8, "sft", parent, {"a": {"b": "z" * 9000}}, {"stage": "sft"}, {"data": DATA}
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
        assert seen["metrics"] == [("accuracy", 0, 0.5), ("train/loss", 0, 1.0)]


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


def test_what_a_stage_made_and_wrote_may_be_told_twice(
    make: Callable[[], Tracker], read: Read
) -> None:
    run_id = make().open_run(TrackedRun("o" * 8, "rl_round_1", inputs={"data": DATA}))
    policy = Artifact(kind="policy", uri="/nowhere", digest="e" * 64, fingerprint="f" * 64)
    sample = KeptSample(
        name="a", group=0, prompt="1+1=", tokens=("2",), num_tokens=1, mismatch=(None,),
        score=None, reward=None, finish_reason="length",
    )  # fmt: skip
    for artifact in (policy, policy, DATA):
        make().log_output(run_id, TrackedOutput("rl_round_1", artifact, None, {"accuracy": 0.5}))
        make().log_samples(run_id, {3: [sample]}, {3: 1000})
    make().set_state(run_id, "FINISHED", {}, {"accuracy": 0.5})
    assert read(make(), run_id)["metrics"] == [("accuracy", 0, 0.5)]


def test_files_are_kept_with_a_run(make: Callable[[], Tracker], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    tracker = make()
    run_id = tracker.open_run(TrackedRun("f" * 8, "files"))
    tracker.log_files(run_id, tmp_path, "report")
    tracker.log_files(run_id, tmp_path, "report")


def test_a_refusal_is_told_from_an_absence(make: Callable[[], Tracker]) -> None:
    with pytest.raises(TrackerRefusedError):
        make().set_state("no such run", "FINISHED", {}, {})
