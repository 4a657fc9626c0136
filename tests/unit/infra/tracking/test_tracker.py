"""Runs in a real embedded MLflow database: exactly once, lineage, registry, outage."""

import logging
import math
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from infra.store.stage_spec import Artifact
from infra.tracking.journal import Journal, JournalRecord, read_records
from infra.tracking.mlflow_connection import flatten, metric_key
from infra.tracking.stage_run import OFFSET_TAG, JournalReader
from infra.tracking.tracker import Tracker


def reader(path: Path) -> JournalReader:
    """A journal of one segment."""

    def read(positions: Mapping[int, int]) -> tuple[list[JournalRecord], dict[int, int]]:
        records, end = read_records(path, positions.get(0, 0))
        return records, {0: end}

    return read


DATASET = Artifact(kind="dataset", uri="/store/dataset", digest="d" * 64, fingerprint="f" * 64)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture(scope="module")
def tracker(home: Path) -> Iterator[Tracker]:
    tracker = Tracker.open(home, uri=f"sqlite:///{home / 'mlflow.db'}")
    tracker.start_pipeline("opens the database", {}, {})
    return tracker


@pytest.fixture(scope="module")
def client(home: Path, tracker: Tracker) -> MlflowClient:
    return MlflowClient(tracking_uri=tracker.uri)


def _run(client: MlflowClient, run_id: str | None) -> Run:
    assert run_id is not None
    return client.get_run(run_id)


def _rows(home: Path, run_id: str | None) -> list[tuple[str, int, float, int, int]]:
    """The metric rows as the database holds them, without MLflow's help."""
    with sqlite3.connect(home / "mlflow.db") as database:
        query = "SELECT key, step, value, timestamp, is_nan FROM metrics WHERE run_uuid = ?"
        return sorted(database.execute(query, (run_id,)).fetchall())


def test_pipeline_and_stage_runs_hold_settings_lineage_and_outcome(
    tracker: Tracker, client: MlflowClient, tmp_path: Path
) -> None:
    parent = tracker.start_pipeline("p", {"rl": {"lr": 1e-6, "rounds": 2}}, {"recipe": "q"})
    stage = tracker.stage_run(
        parent, "sft", "a" * 64, {"x": {"y": "z" * 9000}}, {"data": DATASET.digest}
    )
    output = Artifact(kind="policy", uri="/store/p", digest="e" * 64)
    stage.finish("FINISHED", output, {"val-core/accuracy": 0.5, "pass@4": 0.75})
    tracker.finish_pipeline(parent, "FINISHED", {"seconds": 12.0})

    run = _run(client, parent)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "p"
    assert run.data.params == {"rl.lr": "1e-06", "rl.rounds": "2"}
    assert run.data.tags["rlhf.recipe"] == "q"
    assert run.data.metrics == {"seconds": 12.0}

    child = _run(client, stage.run_id)
    tags = child.data.tags
    assert child.info.status == "FINISHED"
    assert tags["mlflow.parentRunId"] == parent
    assert (tags["rlhf.stage"], tags["rlhf.fingerprint"]) == ("sft", "a" * 64)
    assert (tags["rlhf.run_name"], tags["rlhf.reused"]) == ("p", "false")
    assert tags["rlhf.input.data"] == "d" * 64
    assert (tags["rlhf.output.digest"], tags["rlhf.output.kind"]) == ("e" * 64, "policy")
    assert child.data.params == {"x.y": "z" * 500}
    assert child.data.metrics == {"val-core/accuracy": 0.5, "pass_at_4": 0.75}
    (seen,) = child.inputs.dataset_inputs
    assert seen.dataset.digest == "d" * 36
    assert {tag.key: tag.value for tag in seen.tags}["digest"] == "d" * 64


def test_the_artifacts_of_an_embedded_experiment_stay_under_the_home(
    tracker: Tracker, client: MlflowClient, home: Path, tmp_path: Path
) -> None:
    parent = tracker.start_pipeline("files", {}, {})
    (tmp_path / "report.json").write_text("{}")
    tracker.log_artifacts(parent, tmp_path, "report")
    assert [f.path for f in client.list_artifacts(str(parent), "report")] == ["report/report.json"]
    (found,) = (home / "mlflow-artifacts").rglob("report.json")
    assert parent in found.parts


def test_shipping_again_and_after_a_torn_tail_adds_no_row(
    tracker: Tracker, client: MlflowClient, home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    parent = tracker.start_pipeline("ships", {}, {})
    expected = []
    with Journal(path) as journal:
        for step in range(300):
            journal.metrics(step, {"actor/pg_loss": -step / 7, "timing_s/gen": step})
            journal.progress(step, 300)
        journal.metrics(300, {"odd": math.nan, "big": math.inf})
    stage = tracker.stage_run(parent, "rl_round_1", "b" * 64, {}, {})
    assert stage.ship(reader(path), now=True)
    rows = _rows(home, stage.run_id)
    expected = sorted(
        (key, step, value)
        for step in range(300)
        for key, value in (("actor/pg_loss", -step / 7), ("timing_s/gen", float(step)))
    )
    assert [r[:3] for r in rows if r[0] not in {"odd", "big"}] == expected
    assert [(r[0], r[4]) for r in rows if r[0] in {"odd", "big"}] == [("big", 0), ("odd", 1)]
    assert len(rows) == 602

    # A second follower of the same run, in another process, starts from the tag.
    again = tracker.stage_run(parent, "rl_round_1", "b" * 64, {}, {})
    assert again.run_id == stage.run_id
    assert again.ship(reader(path), now=True)
    assert _rows(home, stage.run_id) == rows

    # The process was killed between the rows and the offset: everything is sent once more.
    client.set_tag(str(stage.run_id), OFFSET_TAG, "{}")
    killed = tracker.stage_run(parent, "rl_round_1", "b" * 64, {}, {})
    assert killed.ship(reader(path), now=True)
    assert _rows(home, stage.run_id) == rows

    # The job was killed inside a record; half of it is not shipped, and its repeat is, once.
    with path.open("ab") as file:
        file.write(b'{"kind":"metrics","step":301,"time_ms":1,"values":{"actor/pg_lo')
    assert killed.ship(reader(path), now=True)
    assert _rows(home, stage.run_id) == rows
    with Journal(path) as journal:
        journal.metrics(300, {"odd": math.nan, "big": math.inf})
        journal.metrics(301, {"actor/pg_loss": 1.5})
    assert killed.ship(reader(path), now=True)
    gained = [r for r in _rows(home, stage.run_id) if r not in rows]
    assert [r[:3] for r in gained] == [("actor/pg_loss", 301, 1.5)]


def test_shipping_is_rare_unless_asked_for(tracker: Tracker, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    stage = tracker.stage_run(None, "often", "c" * 64, {}, {})
    with Journal(path) as journal:
        journal.metrics(0, {"a": 1})
        assert stage.ship(reader(path))
        journal.metrics(1, {"a": 2})
        assert not stage.ship(reader(path))
        assert len(_rows(home, stage.run_id)) == 1
        assert stage.ship(reader(path), now=True)
    assert len(_rows(home, stage.run_id)) == 2


def test_a_reused_stage_has_a_run_of_its_own_below_the_new_pipeline(
    tracker: Tracker, client: MlflowClient, home: Path
) -> None:
    output = Artifact(kind="model", uri="/store/m", digest="9" * 64)
    runs = []
    for reused in (False, True):
        parent = tracker.start_pipeline("again", {}, {})
        stage = tracker.stage_run(parent, "merge", "1" * 64, {"a": 1}, {"policy": DATASET.digest})
        stage.finish("FINISHED", output, {"accuracy": 0.9}, reused=reused)
        stage.finish("FINISHED", output, {"accuracy": 0.9}, reused=reused)
        runs.append(_run(client, stage.run_id))
        assert len(_rows(home, stage.run_id)) == 1
    assert runs[0].info.run_id != runs[1].info.run_id
    assert [run.data.tags["rlhf.reused"] for run in runs] == ["false", "true"]
    assert runs[1].data.tags["rlhf.output.digest"] == "9" * 64
    assert runs[1].data.metrics == {"accuracy": 0.9}


def test_headline_metrics_do_not_repeat_what_the_journal_brought(
    tracker: Tracker, home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.metrics(7, {"val-core/accuracy": 0.25})
    stage = tracker.stage_run(None, "sft", "2" * 64, {}, {})
    assert stage.ship(reader(path))
    with Journal(path) as journal:
        journal.metrics(8, {"late": 1})  # not shipped by anybody: finishing does
    assert not stage.ship(reader(path))
    stage.finish("FAILED", None, {"val-core/accuracy": 0.25, "rows": 3})
    assert [row[:3] for row in _rows(home, stage.run_id)] == [
        ("late", 8, 1.0),
        ("rows", 0, 3.0),
        ("val-core/accuracy", 7, 0.25),
    ]


def test_a_retried_flow_run_continues_its_run(tracker: Tracker, client: MlflowClient) -> None:
    first = tracker.start_pipeline("flow", {"a": 1}, {"flow_run_id": "fr-1"})
    tracker.finish_pipeline(first, "FAILED")
    assert _run(client, first).info.status == "FAILED"
    second = tracker.start_pipeline("flow", {"a": 1}, {"flow_run_id": "fr-1"})
    assert second == first
    assert _run(client, first).info.status == "RUNNING"
    assert tracker.start_pipeline("flow", {}, {"flow_run_id": "fr-2"}) != first


def test_a_run_of_the_same_name_is_continued_only_on_request(
    tracker: Tracker, client: MlflowClient
) -> None:
    first = tracker.start_pipeline("named", {"a": 1}, {})
    tracker.stage_run(first, "sft", "6" * 64, {}, {})
    assert tracker.start_pipeline("named", {"a": 1}, {}, resume=True) == first
    second = tracker.start_pipeline("named", {"a": 1}, {})
    assert second not in {first, None}
    assert tracker.start_pipeline("other name", {}, {}, resume=True) not in {first, second}


def test_the_runs_of_a_killed_process_are_ended(
    tracker: Tracker, client: MlflowClient, home: Path
) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from infra.tracking.tracker import Tracker
        tracker = Tracker.open(Path({str(home)!r}), uri={tracker.uri!r})
        parent = tracker.start_pipeline("killed", {{}}, {{}})
        print(parent, tracker.stage_run(parent, "sft", "3" * 64, {{}}, {{}}).run_id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, timeout=60
    )
    run_ids = killed.stdout.split()
    assert [_run(client, run_id).info.status for run_id in run_ids] == ["RUNNING"] * 2
    mine = tracker.start_pipeline("next", {}, {})
    assert [_run(client, run_id).info.status for run_id in run_ids] == ["KILLED"] * 2
    assert _run(client, mine).info.status == "RUNNING"


def test_a_model_is_one_version_per_digest_and_the_alias_follows(
    tracker: Tracker, client: MlflowClient, tmp_path: Path
) -> None:
    models = [
        Artifact(kind="model", uri=str(tmp_path / name), digest=name * 64, fingerprint=name * 64)
        for name in "ab"
    ]
    for model in models:
        Path(model.uri).mkdir()
    parent = tracker.start_pipeline("promotes", {}, {})
    assert tracker.registered_model("m", "champion") is None
    versions = [
        tracker.register_model("m", "champion", model, parent, {"accuracy": 0.9})
        for model in (models[0], models[0], models[1])
    ]
    assert versions == ["1", "1", "2"]
    champion = tracker.registered_model("m", "champion")
    assert champion is not None
    assert (champion.version, champion.digest, champion.uri) == ("2", "b" * 64, models[1].uri)
    assert champion.metrics == {"accuracy": 0.9}
    assert tracker.register_model("m", "champion", models[0], parent, {}) == "1"
    assert client.get_model_version_by_alias("m", "champion").version in {1, "1"}
    assert client.get_model_version("m", "1").source == models[0].uri


def test_an_absent_server_costs_one_warning_and_no_time(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.metrics(0, {"a": 1})
    tracker = Tracker("http://127.0.0.1:9", tmp_path, retry_after_s=60)
    caplog.set_level(logging.WARNING, logger="infra")
    started = time.monotonic()
    parent = tracker.start_pipeline("p", {}, {})
    assert time.monotonic() - started < 6
    started = time.monotonic()
    stage = tracker.stage_run(parent, "sft", "4" * 64, {}, {})
    assert not stage.ship(reader(path), now=True)
    stage.finish("FINISHED", DATASET, {"a": 1})
    tracker.finish_pipeline(parent, "FINISHED")
    tracker.log_artifacts(parent, tmp_path)
    assert tracker.register_model("m", "champion", DATASET, parent, {}) is None
    assert time.monotonic() - started < 0.1, "a dead server is left alone"
    (warning,) = [r for r in caplog.records if r.name.startswith("infra")]
    assert "metrics stay in the journal" in warning.getMessage()


def test_a_database_that_comes_back_gets_what_it_missed(home: Path, tmp_path: Path) -> None:
    gate = tmp_path / "absent"
    gate.write_text("a file where the database's directory should be")
    tracker = Tracker(f"sqlite:///{gate / 'mlflow.db'}", tmp_path / "files", retry_after_s=0.0)
    journal_path = tmp_path / "journal.jsonl"
    with Journal(journal_path) as journal:
        journal.metrics(0, {"a": 1})
    stage = tracker.stage_run(None, "sft", "5" * 64, {}, {})
    assert stage.run_id is None
    assert not stage.ship(reader(journal_path), now=True)
    gate.unlink()
    gate.mkdir()
    # A ready database spares this test MLflow's migrations.
    with sqlite3.connect(home / "mlflow.db") as source, sqlite3.connect(gate / "mlflow.db") as copy:
        source.backup(copy)
    assert stage.ship(reader(journal_path), now=True)
    assert [row[:3] for row in _rows(gate, stage.run_id)] == [("a", 0, 1.0)]


def test_importing_the_tracker_does_not_import_mlflow() -> None:
    code = (
        "import sys, infra.tracking.tracker, infra.ray.jobs; "
        "print({'mlflow', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "set()"


def test_names_and_settings_take_the_form_that_mlflow_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert metric_key("val-core/acc:mean pass@16 (95 %)") == "val-core/acc:mean pass_at_16 _95 __"
    assert len(metric_key("x" * 1000)) == 250
    monkeypatch.setenv("SOME_TOKEN", "canary-123456")
    assert os.environ["SOME_TOKEN"]
    assert flatten({"a": {"b": [1, 2], "c": {}}, "d": "has canary-123456 inside"}) == {
        "a.b": "[1, 2]",
        "a.c": "{}",
        "d": "has *** inside",
    }
