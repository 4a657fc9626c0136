"""What is MLflow's own: its tables, its failures, its model format, its names."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from mlflow.utils.validation import _validate_metric_name
from rlhf.testing.tiny_models import write_tiny_models
from tracked_world import CLOSE_S, warnings

from infra.host.ports import answers_ok, pick_ports
from infra.host.processes import is_alive, start_detached, stop_all
from infra.host.records import file_lock
from infra.services.stack import mlflow_server
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal, StageHistory
from infra.tracking.ledger import Ledger, Owner, RunEntry
from infra.tracking.mlflow_tracker import MlflowTracker, flatten, metric_key
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import ModelCandidate, TrackedRun, TrackerSettings
from infra.waiting import wait_for


def test_first_runs_that_start_together_make_one_schema(tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from infra.tracking.mlflow_tracker import MlflowTracker
        from infra.tracking.tracker import TrackedRun, TrackerSettings
        tracker = MlflowTracker(TrackerSettings(Path({str(tmp_path)!r})))
        tracker.origin()  # what a shipper asks first
        print(tracker.open_run(TrackedRun("k" * 8, "run")))
    """
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert len({out for out, _ in ended}) == 1, ended
    assert ended[0][0].strip()
    assert [err for _, err in ended] == [""] * 3


def test_fault_row_21_unwritable_database_warns_and_loses_no_row(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = MlflowTracker(TrackerSettings(tmp_path))
    parent = RunEntry(key="a" * 64, name="run", owner=Owner.this_process())
    stage = parent.model_copy(
        update={"key": "b" * 64, "name": "rl", "fingerprint": "f" * 64, "parent": parent.key}
    )
    store = LocalStorage(tmp_path / "store")
    history = StageHistory(store)
    ledger = Ledger(tmp_path, tracker.address, "store")
    store.attempts.hold(stage.fingerprint, Holder(id="test", process="test"), 0)
    tracker.open_run(TrackedRun(parent.key, "run"))
    with Journal(store.channel(stage.fingerprint).local_dir(0) / "journal.jsonl") as journal:
        for step in range(3):
            journal.metrics(step, {"a": step})
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        for table in ("metrics", "runs"):
            database.execute(
                f"CREATE TRIGGER no_{table} BEFORE INSERT ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'attempt to write a readonly database'); END"
            )
    caplog.set_level(logging.WARNING)
    capfd.readouterr()
    shipper = Shipper(ledger, tracker, history)
    shipper.put(parent)
    shipper.put(stage)
    shipper.close(CLOSE_S)
    (warning,) = warnings(caplog)
    assert "attempt to write" in warning
    assert "\n" not in warning
    printed = "".join(capfd.readouterr())
    assert len(printed.splitlines()) <= 1, printed

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        for table in ("metrics", "runs"):
            database.execute(f"DROP TRIGGER no_{table}")
    later = Shipper(ledger, tracker, history)
    later.put(stage.model_copy(update={"state": "FAILED"}))
    later.close(60)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute("SELECT key, step, value FROM metrics").fetchall()
        states = database.execute("SELECT name, status FROM runs ORDER BY name").fetchall()
    assert sorted(rows) == [("a", 0, 0.0), ("a", 1, 1.0), ("a", 2, 2.0)]
    assert states == [("rl", "FAILED"), ("run", "RUNNING")]


def test_a_registered_model_loads_by_mlflows_own_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_tiny_models(tmp_path)
    directory = tmp_path / "llama"
    digests = {path.name: path.read_bytes() for path in directory.iterdir()}
    artifact = Artifact(kind="model", uri=str(directory), digest="e" * 64)
    tracker = MlflowTracker(TrackerSettings(tmp_path))
    run_id = tracker.open_run(TrackedRun("k" * 8, "promote"))
    tracker.register(ModelCandidate("m", "champion", artifact, directory, run_id, {}))
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == digests

    import mlflow
    from mlflow.transformers import load_model

    mlflow.set_tracking_uri(tracker.uri)
    loaded: Any = load_model("models:/m@champion", return_type="components")
    assert sum(weight.numel() for weight in loaded["model"].parameters()) > 0
    assert loaded["tokenizer"]("t1 t2")["input_ids"] == [3, 4]
    answers = mlflow.pyfunc.load_model("models:/m@champion").predict(["t1 t2"])
    assert len(answers) == 1
    (weights,) = (tmp_path / "mlflow-artifacts").rglob("model.safetensors")
    assert weights.stat().st_nlink == 2, "the store's file, not a copy"


def test_names_and_settings_take_the_form_that_mlflow_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert metric_key("val-core/acc:mean pass@16 (95 %)") == "val-core/acc:mean pass_at_16 _95 __"
    assert len(metric_key("x" * 1000)) == 250
    assert metric_key("val-core/../a//b/./acc") == "val-core/_/a/_/b/_/acc"

    monkeypatch.setenv("SOME_TOKEN", "canary-123456")
    assert flatten({"a": {"b": [1, 2], "c": {}}, "d": "has canary-123456 inside"}) == {
        "a.b": "[1, 2]",
        "a.c": "{}",
        "d": "has *** inside",
    }
    assert json.dumps(flatten({}))


@pytest.mark.parametrize("name", ["/a", "a/", "a//b", "a/../b", "./a", "x" * 249 + "/y", "q (%)/é"])
def test_mlflow_takes_what_a_metric_is_called(name: str) -> None:
    _validate_metric_name(metric_key(name))


def test_initial_query_to_an_embedded_database_runs_alone(tmp_path: Path) -> None:
    """Findings IX 3: the first query makes the tables, and two at once break them."""
    tracker = MlflowTracker(TrackerSettings(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"))
    with file_lock(tmp_path / "mlflow.db.lock", 5.0):
        asking = threading.Thread(target=tracker.origin)
        asking.start()
        asking.join(3.0)
        assert asking.is_alive()
        assert not (tmp_path / "mlflow.db").exists()
    asking.join(60.0)
    assert (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_a_run_that_ends_on_a_server_prints_nothing(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from infra.tracking.mlflow_tracker import MlflowTracker
        from infra.tracking.tracker import TrackedRun, TrackerSettings
        tracker = MlflowTracker(TrackerSettings(Path(sys.argv[1]), uri=sys.argv[2]))
        run = tracker.open_run(TrackedRun("k" * 8, "run"))
        tracker.set_state(run, "FINISHED", {}, {})
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    command = mlflow_server(tmp_path, pick_ports(1)[0])
    log = tmp_path / "server.log"
    server = start_detached(command.argv, log, command.environment)

    def answers() -> bool:
        assert is_alive(server), log.read_text()
        return answers_ok(f"{command.url}/health")

    try:
        wait_for(answers, f"MLflow, whose log is {log}", 600.0)
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), command.url],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
    finally:
        stop_all([server], 20.0)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
