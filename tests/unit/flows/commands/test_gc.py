"""The command `rlhf gc`: its arguments, and what it says."""

import json
import os
import time
import uuid
from pathlib import Path

import pytest
from rlhf.testing.s3_server import environment

from flows.commands.cli import main
from flows.commands.gc import limits_of, size_text
from infra.errors import ConfigError
from infra.garbage import DAY_S, Limits
from infra.store.stage_log import Holder
from infra.store.stage_spec import CommitRecord
from infra.store.storage import LocalStorage
from infra.tracking.mlflow_tracker import MlflowTracker

FINGERPRINT = "f" * 64


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one stage in its store, 40 days old, which one run used."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    storage = LocalStorage(tmp_path / "store")
    source = tmp_path / "out"
    source.mkdir()
    (source / "data.txt").write_text("x" * 5000)
    artifact = storage.publish(source, "policy")
    attempt = storage.attempts.hold(FINGERPRINT, Holder(id=uuid.uuid4().hex, process="test"), 0)
    record = CommitRecord(
        fingerprint=FINGERPRINT, stage="sft", artifact=artifact, attempt=0, committed_at="2026"
    )
    storage.commit(attempt, record)
    storage.runs.begin("a" * 64, "tiny-seed0")
    storage.runs.use("a" * 64, FINGERPRINT)
    at = time.time() - 40 * DAY_S
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (at, at))
    return tmp_path


def test_nothing_goes_unless_it_is_asked_for(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sft ")
    assert lines[0].endswith("ffffffffffff  unused for 40 days")
    assert lines[1].startswith("policy files ")
    assert "5.1 kB" in lines[1]
    assert lines[-1].endswith("would go; add --delete to remove it")
    assert LocalStorage(home / "store").lookup(FINGERPRINT) is not None
    assert main(["gc", "--delete"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("removed")
    assert LocalStorage(home / "store").lookup(FINGERPRINT) is None
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == "nothing of 0 B goes\n"


def test_a_run_is_kept_and_released_by_its_name(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", "--keep", "tiny-seed0", "--delete"]) == 0
    assert "stays: sft ffffffffffff, run tiny-seed0 is kept" in capsys.readouterr().out
    assert main(["gc", "--keep", "tiny-seed1"]) == 2
    error = capsys.readouterr().err
    assert error == "--keep: got 'tiny-seed1'; need a run of this store: tiny-seed0\n"
    assert main(["gc", "--release", "tiny-seed0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [stage["fingerprint"] for stage in said["stages"]] == [FINGERPRINT]


def test_unreachable_registry_ends_gc_before_any_removal(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: MlflowTracker) -> dict[str, str]:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(MlflowTracker, "aliased", refuse)
    assert main(["gc", "--delete"]) == 1
    error = capsys.readouterr().err
    assert "does not say which models have an alias (" in error
    assert "connection refused)" in error
    assert LocalStorage(home / "store").lookup(FINGERPRINT) is not None


def test_a_bucket_that_does_not_answer_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Connections are kept for as long as the process lives, with the credentials of the first use.
    for name, value in environment("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    assert main(["gc", "--store", "s3://bucket/x"]) == 1
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_limits() -> None:
    assert limits_of("36h", None) == Limits(1.5 * DAY_S, None)
    assert limits_of("7d", "1.5TB") == Limits(7 * DAY_S, 1_500_000_000_000)
    assert limits_of("1d", "0") == Limits(DAY_S, 0)
    for unused, size in (("23h", None), ("x", None), ("30", None), ("30d", "big"), ("30d", "-1")):
        with pytest.raises(ConfigError):
            limits_of(unused, size)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**9, "2.0 GB"), (10**16, "10000.0 TB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
