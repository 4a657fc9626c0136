"""Datasets, logged models and traces in MLflow: there once, whoever tells them, how often ever."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.data import get_source
from mlflow.tracking import MlflowClient
from mlflow.types.schema import Schema

from infra.store.artifacts import Manifest, read_manifest
from infra.store.stage_spec import Artifact
from infra.store.storage import LocalStorage
from infra.tracking import mlflow_lineage
from infra.tracking.mlflow_tracker import MlflowTracker
from infra.tracking.samples import KeptSample
from infra.tracking.tracker import TrackedOutput, TrackedRun, TrackerSettings


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # The addresses in the environment of the test run are not those of the test.
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield tmp_path_factory.mktemp("home")


def policy(digit: str) -> Artifact:
    uri = f"s3://bucket/policy/{digit}"
    return Artifact(kind="policy", uri=uri, digest=digit * 64, fingerprint="f" * 64)


POLICY = policy("1")


def tracker(home: Path) -> MlflowTracker:
    """As another process would make it."""
    return MlflowTracker(TrackerSettings(home))


def client(home: Path) -> Any:
    return MlflowClient(tracker(home).uri)


def published(home: Path, kind: str) -> tuple[Artifact, Manifest]:
    source = home / f"new-{kind}"
    source.mkdir()
    prompt = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    table = pa.table(
        {"prompt": pa.array([[{"role": "user", "content": "1+1"}]] * 3, prompt), "n": [1, 2, 3]}
    )
    pq.write_table(table, source / "rl.parquet")
    artifact = LocalStorage(home / "store").publish(source, kind)
    return artifact, read_manifest(Path(artifact.uri))


def test_what_stages_hand_on_is_linked_and_there_once(home: Path) -> None:
    dataset, manifest = published(home, "dataset")
    evaluation, _ = published(home, "evaluation")
    stages = [
        (TrackedRun("a" * 8, "preprocess"), TrackedOutput("preprocess", dataset, manifest, {})),
        (
            TrackedRun("b" * 8, "sft", inputs={"dataset": dataset}),
            TrackedOutput("sft", POLICY, manifest, {"num_steps": 4.0}),
        ),
        (
            TrackedRun("c" * 8, "evaluate", inputs={"data": dataset, "policy": POLICY}),
            TrackedOutput("evaluate", evaluation, None, {"accuracy": 0.5}),
        ),
    ]
    run_ids: list[str] = []
    for _ in range(2):
        run_ids = []
        for run, output in stages:
            run_ids.append(tracker(home).open_run(run))
            tracker(home).log_output(run_ids[-1], output)
            tracker(home).set_state(run_ids[-1], "FINISHED", {}, output.metrics)
    runs = [client(home).get_run(run_id) for run_id in run_ids]
    preprocess, sft, evaluate = runs
    assert [[(i.dataset.name, context(i)) for i in run.inputs.dataset_inputs] for run in runs] == [
        [("dataset", "output")],
        [("dataset", "dataset")],
        [("dataset", "data"), ("evaluation", "output")],
    ]
    ((made,), (read,)) = sft.outputs.model_outputs, evaluate.inputs.model_inputs
    assert made.model_id == read.model_id
    model = client(home).get_logged_model(made.model_id)
    same = f"tags.`rlhf.digest` = '{POLICY.digest}'"
    assert (model.name, model.model_type, model.status) == ("sft", "policy", "READY")
    assert model.source_run_id == sft.info.run_id
    assert model.tags["rlhf.uri"] == POLICY.uri
    assert {(m.key, m.value) for m in model.metrics or ()} == {("num_steps", 4), ("accuracy", 0.5)}
    assert len(client(home).search_logged_models([sft.info.experiment_id], same)) == 1
    (file,) = client(home).list_logged_model_artifacts(model.model_id)
    assert file.path == "manifest.json"
    made_of = client(home).download_artifacts(preprocess.info.run_id, "output/manifest.json")
    assert Path(made_of).read_bytes() == manifest.to_bytes()
    assert client(home).list_artifacts(evaluate.info.run_id) == []

    shown = preprocess.inputs.dataset_inputs[0].dataset
    assert '"num_rows/rl": 3' in (shown.profile or "")
    source: Any = get_source(preprocess.inputs.dataset_inputs[0])
    assert source.uri == dataset.uri
    columns = json.loads(shown.schema or "{}")["mlflow_colspec"]
    assert Schema.from_json(json.dumps(columns)).input_names() == ["rl.prompt", "rl.n"]


def context(dataset_input: Any) -> str:
    tags = {tag.key: tag.value for tag in dataset_input.tags}
    return tags["mlflow.data.context"]


def test_model_logged_by_its_reader_is_linked_to_its_producer(home: Path) -> None:
    reader = tracker(home).open_run(TrackedRun("d" * 8, "merge", inputs={"policy": policy("2")}))
    maker = tracker(home).open_run(TrackedRun("e" * 8, "sft"))
    tracker(home).log_output(maker, TrackedOutput("sft", policy("2"), None, {}))
    read = client(home).get_run(reader).inputs.model_inputs
    made = client(home).get_run(maker).outputs.model_outputs
    assert [each.model_id for each in read] == [each.model_id for each in made]


def test_a_run_that_was_opened_half_way_is_made_whole(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrackedRun("f" * 8, "merge", params={"lr": 1.0}, inputs={"policy": policy("3")})

    def away(*_: Any, **__: Any) -> str:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_lineage, "model_of", away)
        with pytest.raises(ConnectionError):
            tracker(home).open_run(run)
    run_id = tracker(home).open_run(run)
    found = client(home).get_run(run_id)
    assert found.data.params == {"lr": "1.0"}
    assert len(found.inputs.model_inputs) == 1


def sample(name: str) -> KeptSample:
    return KeptSample(
        name=name, group=0, prompt="1+1=", tokens=("2", "<eos>"), num_tokens=2,
        mismatch=(0.25, None), score=1.0, reward=1.0, advantage=0.7, finish_reason="stop",
    )  # fmt: skip


def test_samples_are_traces_of_their_run_once(home: Path) -> None:
    run_id = tracker(home).open_run(TrackedRun("g" * 8, "rl_round_1"))
    steps = {1: [sample("a"), sample("b")], 10: [sample("a")]}
    for _ in range(2):
        tracker(home).log_samples(run_id, steps, {1: 1_700_000_000_000})
    run = client(home).get_run(run_id)
    traces = client(home).search_traces(
        locations=[run.info.experiment_id], filter_string=f"attributes.run_id = '{run_id}'"
    )
    assert sorted(trace.info.tags["rlhf.step"] for trace in traces) == ["1", "1", "10"]
    first = min(traces, key=lambda trace: trace.info.request_time)
    assert first.info.request_time == 1_700_000_000_000
    told = {each.name: each.value for each in first.info.assessments}
    assert told == {"score": 1.0, "advantage": 0.7}
    (span,) = first.data.spans
    assert (span.inputs, span.outputs) == ({"prompt": "1+1="}, {"answer": "2<eos>"})
    assert span.attributes["mismatch"] == [0.25, None]
    assert span.attributes["tokens"] == ["2", "<eos>"]
