"""A pipeline whose servers are away for a while; real Prefect, Ray and MLflow."""

import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_pipeline import RUN_DEADLINE_S, Home, settings

from infra.host.ports import answers_ok, pick_port
from infra.host.processes import ProcessRecord, start_detached, stop_all
from infra.services.stack import down, mlflow_server, prefect_server
from infra.store.storage import open_storage
from infra.tracking.journal import read_journal
from infra.waiting import wait_for

SHORT = settings("rl.num_rounds=0", "sft.num_steps=150", "checkpoint.every_num_steps=50")
PREFECT_AWAY_S = 30.0


def rows_of(home: Home, fingerprint: str) -> list[tuple[str, int, float]]:
    records, _ = read_journal(open_storage(str(home.path / "store")), fingerprint)
    return sorted(
        (name, record.step, value)
        for record in records
        if record.step is not None
        for name, value in record.values.items()
    )


def _num_committed(stages: Path) -> int:
    texts = [entry.read_text() for entry in stages.glob("*/*") if entry.is_file()]
    return sum('"committed"' in text for text in texts)


def _wait_for_training(flow: subprocess.Popen[bytes], out: Path) -> None:
    def trains() -> bool:
        assert flow.poll() is None, out.read_text()
        return "sft  step 3/" in out.read_text()

    wait_for(trains, "three steps of training", RUN_DEADLINE_S)


@pytest.mark.slow
def test_fault_row_21_and_22_outage_and_kill_log_metrics_once(
    tmp_path: Path,
) -> None:
    """MLflow is away from the start; the flow is killed, its job commits with nobody watching."""
    home = Home(tmp_path / "outage")
    port = pick_port(23_000)
    environment = {**home.environment, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    out = tmp_path / "out"
    with out.open("w") as file:
        flow = subprocess.Popen(
            home.command("run", *SHORT), stdout=file, stderr=file, env=environment
        )
    _wait_for_training(flow, out)
    flow.send_signal(signal.SIGKILL)
    flow.wait(timeout=60)
    assert "Traceback" not in out.read_text()
    stages = home.path / "store" / "stages"
    wait_for(lambda: _num_committed(stages) == 2, "SFT to commit unwatched", RUN_DEADLINE_S)

    command = mlflow_server(home.path, port)
    server = start_detached(command.argv, tmp_path / "server.log", command.environment)
    try:
        wait_for(lambda: answers_ok(f"{command.url}/health"), "MLflow", 120.0)
        ended = subprocess.run(
            home.command("run", *SHORT),
            capture_output=True,
            text=True,
            env=environment,
            timeout=RUN_DEADLINE_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        report = home.report(ended.stdout)
        with sqlite3.connect(home.path / "mlflow.db") as database:
            runs = database.execute(
                "SELECT r.run_uuid, r.name, r.status, p.value, f.value FROM runs r "
                "LEFT JOIN tags p ON p.run_uuid = r.run_uuid AND p.key = 'mlflow.parentRunId' "
                "LEFT JOIN tags f ON f.run_uuid = r.run_uuid AND f.key = 'rlhf.fingerprint'"
            ).fetchall()
            logged = database.execute("SELECT run_uuid, key, step, value FROM metrics").fetchall()
        (parent,) = [run for run in runs if run[3] is None]
        stages = {name: (run_id, mark) for run_id, name, _, above, mark in runs if above}
        assert {run[2] for run in runs} == {"FINISHED"}
        assert {run[3] for run in runs} == {None, parent[0]}
        assert sorted(stages) == sorted(stage["name"] for stage in report["stages"])
        for name, (run_id, fingerprint) in stages.items():
            told = rows_of(home, fingerprint)
            names = {key for key, _, _ in told}  # the headline numbers have others, and step 0
            rows = [row[1:] for row in logged if row[0] == run_id and row[1] in names]
            assert sorted(rows) == told, name
        _load_through_the_server(command.url, tmp_path)
    finally:
        stop_all([server], 120.0)


@pytest.mark.stacks
def test_prefect_outage_stops_no_job_and_the_flow_continues(tmp_path: Path) -> None:
    home = Home(tmp_path / "away")
    command = prefect_server(home.path, pick_port(24_000))
    (home.path / "prefect").mkdir(parents=True)
    home.environment["PREFECT_API_URL"] = command.url
    out = tmp_path / "out"

    def start() -> ProcessRecord:
        server = start_detached(command.argv, tmp_path / "server.log", command.environment)
        wait_for(lambda: answers_ok(command.health_url), "Prefect", 240.0)
        return server

    server = start()
    try:
        with out.open("w") as file:
            flow = subprocess.Popen(
                home.command("run", *SHORT), stdout=file, stderr=file, env=home.environment
            )
        _wait_for_training(flow, out)
        stop_all([server], 120.0)
        time.sleep(PREFECT_AWAY_S)
        assert flow.poll() is None, out.read_text()
        server = start()
        assert flow.wait(RUN_DEADLINE_S) == 0, out.read_text()
        attempts = open_storage(str(home.path / "store")).attempts
        for stage in home.report(out.read_text())["stages"]:
            kinds = [entry.kind for entry in attempts.entries(stage["fingerprint"])]
            assert kinds == ["held", "committed"], stage["name"]
        with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
            assert database.execute("select state_type from flow_run").fetchall() == [
                ("COMPLETED",)
            ]
    finally:
        stop_all([server], 120.0)
        down(home.path)


def _load_through_the_server(url: str, tmp_path: Path) -> None:
    code = (
        f"import mlflow; mlflow.set_tracking_uri({url!r}); "
        "model = mlflow.transformers.load_model('models:/tiny@champion'); print(type(model)); "
        "tags = mlflow.MlflowClient().get_model_version_by_alias('tiny', 'champion').tags; "
        "logged = mlflow.get_logged_model(tags['rlhf.logged_model']); "
        "assert logged.tags['rlhf.digest'] == tags['rlhf.digest']"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "TextGenerationPipeline" in done.stdout
