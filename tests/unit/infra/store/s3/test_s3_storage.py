"""Artifacts in a bucket: what a cut connection leaves, and what is sent and fetched how often."""

import hashlib
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.fault_proxy import FaultProxy

from infra import env
from infra.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    StoreDeniedError,
    StoreUnreachableError,
)
from infra.store import storage as storage_module
from infra.store.artifacts import verify_directory
from infra.store.process_stamp import own_stamp
from infra.store.s3 import objects as objects_module
from infra.store.s3.objects import Objects, S3Address
from infra.store.s3.storage import S3Storage
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import open_storage

PART_BYTES = 5 * 2**20
"""The least that S3 takes."""
FINGERPRINT = "f" * 64


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "PART_BYTES", PART_BYTES)


@pytest.fixture
def objects(uri: str) -> Objects:
    return Objects(S3Address.parse(uri))


def output(directory: Path, num_bytes: int = 100, text: str = "more") -> Path:
    (directory / "sub").mkdir(parents=True)
    pattern = bytes(range(251))
    (directory / "weights").write_bytes((pattern * (num_bytes // 251 + 1))[:num_bytes])
    (directory / "sub/b.txt").write_text(text)
    (directory / "empty").touch()
    return directory


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str) -> S3Storage:
    """The store as another machine sees it."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / uuid.uuid4().hex))
    return S3Storage(uri)


def commit(store: S3Storage, artifact: Artifact) -> None:
    attempt = store.attempts.hold(FINGERPRINT, Holder(id="me", process=own_stamp()), 0)
    store.commit(
        attempt,
        CommitRecord(
            fingerprint=FINGERPRINT, stage="sft", artifact=artifact, attempt=0, committed_at="now"
        ),
    )


def sent(proxy: FaultProxy, method: str, part: str = "") -> int:
    return sum(each.method == method and part in each.path for each in proxy.requests)


def test_a_large_artifact_goes_up_in_parts_and_comes_down_whole(
    uri: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Storage(uri)
    artifact = store.publish(output(tmp_path / "out", 2 * PART_BYTES + 7), "model")
    assert sent(proxy, "PUT", "partNumber=") == 3
    assert not (tmp_path / "out").exists()
    other = elsewhere(monkeypatch, tmp_path, uri)
    directory = other.local_copy(artifact)
    assert verify_directory(directory).digest == artifact.digest
    assert (directory / "weights").stat().st_size == 2 * PART_BYTES + 7
    other.verify(artifact, "bytes")
    assert artifact.uri == f"{uri}/artifacts/model/{artifact.digest}"


@pytest.mark.parametrize(
    ("method", "part", "action"),
    [
        ("PUT", "partNumber=2", "cut request"),
        ("PUT", "partNumber=3", 500),
        ("POST", "uploadId=", "cut request"),
        ("PUT", "/sub/b.txt", "cut request"),
        ("PUT", "/weights", 403),
        ("PUT", "manifest.json", "cut request"),
    ],
)
def test_fault_row_28_cut_upload_stays_invisible_and_is_repaired(
    uri: str,
    objects: Objects,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    part: str,
    action: Any,
) -> None:
    monkeypatch.setattr(objects_module, "CREATE_DEADLINE_S", 0.0)
    store = S3Storage(uri)
    objects.require_conditions()
    source = output(tmp_path / "out", 2 * PART_BYTES + 7)
    proxy.fail(action, method, part, times=9)
    error = StoreDeniedError if action == 403 else StoreUnreachableError
    with pytest.raises(error):
        store.publish(source, "model")
    proxy.heal()
    names = [each.name for each in objects.listed("")]
    assert not [name for name in names if name.endswith("manifest.json")]
    assert "weights" not in str(names) or "manifest" in part or "b.txt" in part
    uploads = objects._client.list_multipart_uploads(Bucket=objects.address.bucket)
    mine = [each for each in uploads.get("Uploads", ()) if objects.address.prefix in each["Key"]]
    assert mine == []
    artifact = store.publish(source, "model")
    assert elsewhere(monkeypatch, tmp_path, uri).local_copy(artifact).is_dir()


def test_equal_content_that_is_published_twice_is_sent_once(
    uri: str, objects: Objects, proxy: FaultProxy, tmp_path: Path
) -> None:
    store = S3Storage(uri)
    first = store.publish(output(tmp_path / "one"), "model")
    before, num_puts = objects.listed("artifacts/"), sent(proxy, "PUT")
    assert store.publish(output(tmp_path / "two"), "model") == first
    assert sent(proxy, "PUT") - num_puts == 1, "the manifest, which says that it is needed"
    assert [each[:2] for each in objects.listed("artifacts/")] == [each[:2] for each in before]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no manifest"])
def test_damage_is_reported_and_republish_repairs_visible_damage(
    uri: str,
    objects: Objects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    artifact = S3Storage(uri).publish(output(tmp_path / "out"), "model")
    commit(S3Storage(uri), artifact)
    root = f"artifacts/model/{artifact.digest}"
    if damage == "flip":
        objects.put(f"{root}/sub/b.txt", b"mor3")
    elif damage == "truncate":
        objects.put(f"{root}/weights", bytes(99))
    elif damage == "remove":
        objects.delete([f"{root}/empty"])
    elif damage == "manifest":
        objects.put(f"{root}/manifest.json", b"{}")
    else:
        objects.delete([f"{root}/manifest.json"])
    other = elsewhere(monkeypatch, tmp_path, uri)
    if "manifest" in damage:
        with pytest.raises(ArtifactCorruptError, match="is committed, but its output is damaged"):
            other.lookup(FINGERPRINT)
    for level in ("size", "bytes"):
        if damage != "flip" or level == "bytes":
            with pytest.raises(ArtifactError, match=root):
                other.verify(artifact, level)
    with pytest.raises(ArtifactError):
        other.local_copy(artifact)
    if damage != "flip":
        assert other.publish(output(tmp_path / "again"), "model") == artifact
        assert elsewhere(monkeypatch, tmp_path, uri).local_copy(artifact).is_dir()


def test_a_look_at_a_store_that_fails_is_no_absence(
    uri: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    store = S3Storage(uri)
    commit(store, store.publish(output(tmp_path / "out"), "model"))
    for action, error in ((403, StoreDeniedError), (500, StoreUnreachableError)):
        proxy.fail(action, "GET", times=99)
        with pytest.raises(error):
            S3Storage(uri).lookup(FINGERPRINT)
        proxy.heal()
    assert S3Storage(uri).lookup(FINGERPRINT) is not None


def test_a_download_that_is_cut_goes_on_where_it_was(
    uri: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = S3Storage(uri).publish(output(tmp_path / "out", 3 * PART_BYTES), "model")
    other = elsewhere(monkeypatch, tmp_path, uri)
    proxy.fail("cut answer", "GET", "/weights", times=99, after=2)
    with pytest.raises(StoreUnreachableError):
        other.local_copy(artifact)
    cache = Path(os.environ["RLHF_HOME"]) / "cache"
    assert not [*cache.glob("artifacts/*/*")]
    proxy.heal()
    proxy.requests.clear()
    assert verify_directory(S3Storage(uri).local_copy(artifact)).digest == artifact.digest
    data = [each.range for each in proxy.requests if "/weights" in each.path]
    assert data == [f"bytes={2 * PART_BYTES}-{3 * PART_BYTES - 1}"]
    assert sent(proxy, "GET", "b.txt") == 0


def test_a_torn_part_of_a_download_is_fetched_again(
    uri: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = S3Storage(uri).publish(output(tmp_path / "out", 1000), "model")
    other = elsewhere(monkeypatch, tmp_path, uri)
    partial = Path(os.environ["RLHF_HOME"]) / "cache/partial" / artifact.digest
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(bytes(500))
    (partial / "empty").write_bytes(b"longer than it may be")
    assert verify_directory(other.local_copy(artifact)).digest == artifact.digest
    assert [each.range for each in proxy.requests if "/weights" in each.path][-2:] == [
        "bytes=500-999",
        "bytes=0-999",
    ]


def test_bytes_are_fetched_per_machine_and_verified_per_process(
    uri: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Storage(uri)
    artifact = store.publish(output(tmp_path / "out"), "model")
    store.local_copy(artifact)
    assert sent(proxy, "GET", "/weights") == 0, "who published it has it"
    other = elsewhere(monkeypatch, tmp_path, uri)
    copy = other.local_copy(artifact)
    proxy.requests.clear()
    for _ in range(3):
        assert other.local_copy(artifact) == copy
    assert proxy.requests == []
    (copy / "weights").write_bytes(bytes(100))
    assert S3Storage(uri).local_copy(artifact) == copy
    assert sent(proxy, "GET", "/weights") == 1, "the copy was damaged"
    assert verify_directory(copy).digest == artifact.digest


def test_copy_of_another_store_does_not_hide_a_missing_artifact(uri: str, tmp_path: Path) -> None:
    artifact = S3Storage(uri).publish(output(tmp_path / "out"), "model")
    with pytest.raises(ArtifactNotFoundError):
        S3Storage(f"{uri}-other").local_copy(artifact)


def test_lru_copy_is_evicted_unless_a_live_process_reads_it(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = S3Storage(uri)
    made = [
        store.publish(output(tmp_path / f"out{number}", 10_000, str(number)), "model")
        for number in range(4)
    ]
    other = elsewhere(monkeypatch, tmp_path, uri)
    monkeypatch.setenv("RLHF_CACHE_BYTES", "25000")
    program = (
        "import sys; from infra.store.storage import open_storage\n"
        "from infra.store.stage_spec import Artifact\n"
        "for text in sys.argv[2:]:\n"
        "    print(open_storage(sys.argv[1]).local_copy(Artifact.model_validate_json(text)))"
    )
    texts = [each.model_dump_json() for each in made[:2]]
    ended = subprocess.run(
        [sys.executable, "-c", program, uri, *texts],
        env=env.child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, second = map(Path, ended.stdout.split())
    assert other.local_copy(made[1]) == second
    third = other.local_copy(made[2])
    assert [first.exists(), second.exists(), third.exists()] == [False, True, True]
    fourth = other.local_copy(made[3])
    assert [second.exists(), third.exists(), fourth.exists()] == [True] * 3, "all are read"
    assert "all of it is in use" in caplog.text


def test_a_limit_that_is_no_number_is_refused(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE_BYTES", "10GB")
    with pytest.raises(ConfigError, match=r"^environment\.RLHF_CACHE_BYTES: got '10GB'; need"):
        S3Storage(uri).publish(output(tmp_path / "out"), "model")


def test_what_changes_while_it_is_published_is_refused(
    uri: str, objects: Objects, tmp_path: Path
) -> None:
    wrong = {"weights": hashlib.sha256(b"what it was").hexdigest()}
    with pytest.raises(ArtifactCorruptError, match=r"weights: sha256 .*; need "):
        S3Storage(uri).publish(output(tmp_path / "out"), "model", wrong)
    assert "manifest" not in str(objects.listed("artifacts/"))


def test_the_library_is_loaded_only_for_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys; from infra.store.storage import open_storage\n"
        "import flows.commands.run, engines.config.stages.rl\n"
        "open_storage(sys.argv[1]).lookup('f' * 64)\n"
        "print({'boto3', 'botocore', 'infra.store.s3'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout.strip() == "set()"
    monkeypatch.setattr("infra.plugins._installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"^storage: s3 needs the extra: pip install '.*\[s3\]'"):
        open_storage("s3://bucket/x")
    assert storage_module.STORES.names() == ["s3"]
