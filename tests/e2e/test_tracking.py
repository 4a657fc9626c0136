"""Tracking through an outage and a kill: a real pipeline, a real MLflow server that is away.

MLflow is down from the start, the flow is killed with SIGKILL while SFT trains, its job commits
with nobody watching; then MLflow is up and the same command is given again.
"""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipeline import RUN_DEADLINE_S, Home, settings

from infra.host.loopback_http import answers_ok
from infra.host.processes import pick_port, start_detached, stop_all
from infra.services.commands import mlflow_server
from infra.store.storage import open_storage
from infra.tracking.journal import read_journal
from infra.waiting import wait_for

pytestmark = pytest.mark.stacks

LONG_SFT = settings("sft.num_steps=150")


def rows_of(home: Home, fingerprint: str) -> list[tuple[str, int, float]]:
    records, _ = read_journal(open_storage(str(home.path / "store")), fingerprint)
    return sorted(
        (name, record.step, value)
        for record in records
        if record.step is not None
        for name, value in record.values.items()
    )


def test_an_outage_and_a_kill_lose_and_double_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "outage")
    port = pick_port(23_000)
    environment = {**home.environment, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    out = tmp_path / "out"
    with out.open("w") as file:
        flow = subprocess.Popen(
            home.command("run", *LONG_SFT), stdout=file, stderr=file, env=environment
        )
    wait_for(lambda: "sft  step 3/" in out.read_text(), "three steps", RUN_DEADLINE_S)
    flow.send_signal(signal.SIGKILL)
    flow.wait(timeout=10)
    assert "Traceback" not in out.read_text()

    command = mlflow_server(home.path, port)
    server = start_detached(command.argv, tmp_path / "server.log", command.environment)
    try:
        wait_for(lambda: answers_ok(f"{command.url}/health"), "MLflow", 120.0)
        ended = subprocess.run(
            home.command("run", *LONG_SFT),
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
            logged = database.execute(
                "SELECT run_uuid, key, step, value FROM metrics WHERE step > 0"
            ).fetchall()
        (parent,) = [run for run in runs if run[3] is None]
        stages = {name: (run_id, mark) for run_id, name, _, above, mark in runs if above}
        assert {run[2] for run in runs} == {"FINISHED"}
        assert {run[3] for run in runs} == {None, parent[0]}
        assert sorted(stages) == sorted(stage["name"] for stage in report["stages"])
        for name, (run_id, fingerprint) in stages.items():
            rows = sorted((key, step, value) for run, key, step, value in logged if run == run_id)
            assert rows == rows_of(home, fingerprint), name
        _load_through_the_server(command.url, tmp_path)
    finally:
        stop_all([server], 20.0)


def _load_through_the_server(url: str, tmp_path: Path) -> None:
    code = (
        f"import mlflow; mlflow.set_tracking_uri({url!r}); "
        "model = mlflow.transformers.load_model('models:/tiny@champion'); print(type(model))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert "TextGenerationPipeline" in done.stdout, done.stderr
