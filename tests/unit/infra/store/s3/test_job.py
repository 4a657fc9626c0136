"""A real job on a bucket, with nothing shared but that: it has a home of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from rlhf.testing.fault_proxy import FaultProxy

from infra import env
from infra.store.canonical import canonical_json
from infra.store.process_stamp import own_stamp
from infra.store.s3.storage import S3Storage
from infra.store.stage_log import Holder
from infra.store.stage_spec import StageSpec

FINGERPRINT = "ab" * 32


@pytest.fixture
def store(uri: str) -> S3Storage:
    return S3Storage(uri)


@pytest.fixture
def spec(store: S3Storage, tmp_path: Path) -> StageSpec:
    """A promote stage whose inputs are in the store."""
    inputs = {}
    for kind, name, content in (
        ("evaluation", "summary.json", {"metrics": {"accuracy": 0.75}}),
        ("model", "config.json", {}),
    ):
        directory = tmp_path / kind
        directory.mkdir()
        (directory / name).write_bytes(canonical_json(content))
        inputs[kind] = store.publish(directory, kind)
    return StageSpec(
        stage="promote",
        job_module="engines.jobs.promote",
        fingerprint=FINGERPRINT,
        attempt=0,
        holder="test",
        config={"promote": {"metric": "accuracy", "min_value": 0.5}},
        inputs=inputs,
        seed=0,
        store_uri=store.uri,
        runtime={},
    )


def run(
    store: S3Storage, spec: StageSpec, tmp_path: Path, attempt: int = 0, faults: str = ""
) -> "subprocess.CompletedProcess[str]":
    spec = spec.model_copy(update={"attempt": attempt})
    store.attempts.hold(FINGERPRINT, Holder(id="test", process=own_stamp()), attempt)
    store.channel(FINGERPRINT).write_specification(spec)
    home = tmp_path / f"machine-{attempt}"
    home.mkdir()
    return subprocess.run(
        [sys.executable, *spec.job_argv],
        cwd=Path(__file__).resolve().parents[5],
        capture_output=True,
        text=True,
        timeout=120,
        env=env.child_environment(RLHF_HOME=str(home), RLHF_FAULTS=faults or None),
    )


def test_a_job_on_another_machine_publishes_and_commits(
    store: S3Storage, spec: StageSpec, tmp_path: Path
) -> None:
    done = run(store, spec, tmp_path)
    assert done.returncode == 0, done.stderr
    record = store.lookup(FINGERPRINT)
    assert record is not None
    assert (record.attempt, record.artifact.kind) == (0, "promotion")
    assert record.artifact.uri.startswith(f"{store.uri}/artifacts/promotion/")
    assert any(store.local_copy(record.artifact).iterdir())
    channel = store.channel(FINGERPRINT)
    assert channel.read_error(0) is None
    assert channel.read_beat(0) is not None
    assert not list((tmp_path / "home").rglob("attempt-0"))


@pytest.mark.parametrize(
    "point",
    ["storage.before_manifest", pytest.param("storage.before_commit", marks=pytest.mark.slow)],
)
def test_job_killed_at_its_end_is_completed_by_the_next_one(
    store: S3Storage, spec: StageSpec, tmp_path: Path, point: str
) -> None:
    killed = run(store, spec, tmp_path, faults=f"{point}=kill")
    assert killed.returncode == -9
    assert store.lookup(FINGERPRINT) is None
    done = run(store, spec, tmp_path, attempt=1)
    assert done.returncode == 0, done.stderr
    record = store.lookup(FINGERPRINT)
    assert record is not None
    assert record.attempt == 1
    store.verify(record.artifact, "bytes")


def test_a_job_that_is_refused_says_so_where_its_watchers_look(
    store: S3Storage, spec: StageSpec, tmp_path: Path, proxy: FaultProxy
) -> None:
    proxy.fail(403, "PUT", "/artifacts/promotion/", times=99)
    done = run(store, spec, tmp_path)
    assert done.returncode == 1
    problem = store.channel(FINGERPRINT).read_error(0)
    assert problem is not None
    assert problem.type == "StoreDeniedError"
    assert "403 AccessDenied; let these credentials" in problem.message
    assert store.lookup(FINGERPRINT) is None
