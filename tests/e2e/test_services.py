"""`up`, `status` and `down` with the real Prefect, MLflow and Ray servers."""

import os
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlhf.testing.tiny_models import write_tiny_models

from infra import env
from infra.host import servers
from infra.host.ports import online_workers
from infra.host.processes import ProcessRecord, is_alive
from infra.ray.cluster import ensure_cluster
from infra.services.stack import (
    WORK_POOL,
    down,
    running_url,
    status,
    up,
)
from infra.store.stage_spec import Artifact
from infra.tracking.mlflow_tracker import MlflowTracker
from infra.tracking.samples import KeptSample
from infra.tracking.tracker import (
    MetricPoint,
    ModelCandidate,
    TrackedOutput,
    TrackedRun,
    TrackerSettings,
)

pytestmark = [pytest.mark.slow, pytest.mark.exclusive]

NAMES = ("prefect", "worker", "mlflow", "ray")


@pytest.fixture(scope="module", autouse=True)
def _no_addresses() -> Iterator[None]:
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "PREFECT_API_URL")
    before = {name: os.environ.pop(name, None) for name in names}
    yield
    for name, value in before.items():
        env.set_for_process(name, value)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("services-home")
    try:
        yield home
    finally:
        down(home)


@pytest.fixture(scope="module")
def running(home: Path) -> Path:
    assert [service.state for service in up(home)] == ["up"] * 4
    return home


def _records(home: Path) -> dict[str, ProcessRecord]:
    records = {}
    for name in NAMES:
        record = servers.load(home, name)
        assert record is not None
        assert record.process is not None
        records[name] = record.process
    return records


def test_everything_answers_on_loopback_only(running: Path) -> None:
    records = _records(running)
    families = {
        name: {record.pid, *(c.pid for c in psutil.Process(record.pid).children(recursive=True))}
        for name, record in records.items()
    }
    listening: dict[str, set[str]] = {name: set() for name in NAMES}
    for connection in psutil.net_connections("tcp"):
        for name, pids in families.items():
            if connection.status == psutil.CONN_LISTEN and connection.pid in pids:
                listening[name].add(connection.laddr.ip)
    for name in ("prefect", "mlflow", "ray"):
        assert listening[name]
        assert listening[name] <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, name


def test_the_worker_polls_its_pool(running: Path) -> None:
    url = running_url(running, "prefect")
    assert url is not None
    assert online_workers(url, WORK_POOL) == 1
    with urllib.request.urlopen(f"{url}/work_pools/{WORK_POOL}", timeout=60) as answer:
        assert b'"type":"process"' in answer.read().replace(b'": "', b'":"')


def test_a_second_up_changes_nothing(running: Path) -> None:
    before = _records(running)
    up(running)
    assert _records(running) == before


def test_a_run_uses_the_head_and_does_not_end_it(running: Path) -> None:
    cluster = ensure_cluster(running)
    assert not cluster.started
    assert cluster.api.call("GET", "/api/jobs/") == []
    assert cluster.release() is False
    assert is_alive(_records(running)["ray"])


def test_model_is_registered_and_loaded_via_mlflow_server(
    running: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = running_url(running, "mlflow")
    assert url is not None
    tracker = MlflowTracker(TrackerSettings(running, url))
    parent = tracker.open_run(TrackedRun("p" * 8, "through the server", params={"a": 1}))
    run_id = tracker.open_run(TrackedRun("s" * 8, "promote", parent))
    points = [MetricPoint("train/loss", 1.0 / (step + 1), step, 1000 + step) for step in range(50)]
    for _ in range(2):
        tracker.log_metrics(run_id, points, "50")
    policy = Artifact(kind="policy", uri="/nowhere", digest="d" * 64, fingerprint="f" * 64)
    sample = KeptSample(
        name="a", group=0, prompt="1+1=", tokens=("2",), num_tokens=1, mismatch=(0.5,),
        score=1.0, reward=1.0, advantage=0.5, finish_reason="stop",
    )  # fmt: skip
    for _ in range(2):
        tracker.log_output(run_id, TrackedOutput("rl_round_1", policy, None, {"accuracy": 0.9}))
        tracker.log_samples(run_id, {3: [sample]}, {3: 1_700_000_000_000})
    tracker.set_state(run_id, "FINISHED", {}, {"accuracy": 0.9})

    write_tiny_models(tmp_path)
    directory = tmp_path / "llama"
    artifact = Artifact(kind="model", uri=str(directory), digest="e" * 64, fingerprint="f" * 64)
    candidate = ModelCandidate("m", "champion", artifact, directory, run_id, {"accuracy": 0.9})
    assert [tracker.register(candidate) for _ in range(2)] == ["1", "1"]

    from mlflow import set_tracking_uri
    from mlflow.tracking import MlflowClient
    from mlflow.transformers import load_model

    client: Any = MlflowClient(url)
    run = client.get_run(run_id)
    (made,) = run.outputs.model_outputs
    assert client.get_logged_model(made.model_id).tags["rlhf.digest"] == policy.digest
    (trace,) = client.search_traces(locations=[run.info.experiment_id])
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run_id
    assert {each.name: each.value for each in trace.info.assessments}["score"] == 1.0
    assert trace.data.spans[0].attributes["mismatch"] == [0.5]
    history = client.get_metric_history(run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(p.step, p.value) for p in points]
    set_tracking_uri(url)
    # Another machine has neither the store nor the server's files.
    shutil.move(directory, tmp_path / "elsewhere")
    loaded: Any = load_model("models:/m@champion", return_type="components")
    assert sum(weight.numel() for weight in loaded["model"].parameters()) > 0


def test_a_service_that_died_is_started_again(running: Path) -> None:
    before = _records(running)
    mlflow = psutil.Process(before["mlflow"].pid)
    mlflow.kill()
    mlflow.wait(timeout=60)
    assert {s.name: s.state for s in status(running)}["mlflow"] == "down"
    assert [service.state for service in up(running)] == ["up"] * 4
    after = _records(running)
    assert after["mlflow"] != before["mlflow"]
    assert {k: v for k, v in after.items() if k != "mlflow"} == {
        k: v for k, v in before.items() if k != "mlflow"
    }


def test_zz_down_ends_exactly_these_and_is_idempotent(running: Path) -> None:
    processes = [
        process
        for record in _records(running).values()
        for process in (
            psutil.Process(record.pid),
            *psutil.Process(record.pid).children(recursive=True),
        )
    ]
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        started = time.monotonic()
        ended, kept = down(running)
        assert (sorted(ended), kept) == (sorted(NAMES), [])
        assert time.monotonic() - started < 60
        assert psutil.wait_procs(processes, timeout=60)[1] == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert down(running) == ([], [])
    assert [service.state for service in status(running)] == ["down"] * 4


def test_zz_down_spares_the_head_of_a_run_that_is_no_service(tmp_path: Path) -> None:
    cluster = ensure_cluster(tmp_path)
    try:
        assert cluster.started
        ended, kept = down(tmp_path)
        assert (ended, [(k.name, k.users) for k in kept]) == ([], [("ray", (os.getpid(),))])
        assert cluster.api.version()
    finally:
        assert cluster.release() is True


def test_zz_an_up_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "prefect").write_text("a file where the server's directory should be")
    code = f"""
        from pathlib import Path
        from infra.errors import ServiceError
        from infra.services.stack import up
        try:
            up(Path({str(tmp_path)!r}), deadline_s=90)
        except ServiceError as error:
            print("refused:", error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "refused: prefect ended" in done.stdout
    assert list((tmp_path / "services").glob("*.json")) == []
    assert [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ] == []
