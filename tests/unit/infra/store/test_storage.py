import multiprocessing
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    FencedError,
)
from infra.store import artifacts
from infra.store.artifacts import external_artifact
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage, Storage, open_storage

FINGERPRINT = "f" * 64
OTHER = "e" * 64


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """A directory on another file system than `tmp_path`."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("needs /dev/shm on another file system than the temporary directory")
    with tempfile.TemporaryDirectory(dir=shm) as directory:
        yield Path(directory)


def output(directory: Path, text: str = "weights") -> Path:
    (directory / "sub").mkdir(parents=True)
    (directory / "a.txt").write_text(text)
    (directory / "sub/b.txt").write_text("more")
    return directory


def record(artifact: Artifact, attempt: int = 0, fingerprint: str = FINGERPRINT) -> CommitRecord:
    return CommitRecord(
        fingerprint=fingerprint,
        stage="sft",
        artifact=artifact.model_copy(update={"fingerprint": fingerprint}),
        attempt=attempt,
        metrics={"accuracy": 0.5},
        committed_at="2026-01-01T00:00:00Z",
    )


def test_published_committed_fetched(store: Storage, tmp_path: Path) -> None:
    artifact = store.publish(output(tmp_path / "out"), "model")
    assert artifact.kind == "model"
    assert Path(artifact.uri) == tmp_path / "store/artifacts/model" / artifact.digest
    assert not (tmp_path / "out").exists()
    assert store.lookup(FINGERPRINT) is None
    standing = commit(store, record(artifact))
    assert standing == record(artifact)
    assert standing.artifact.fingerprint == FINGERPRINT
    assert open_storage(store.uri).lookup(FINGERPRINT) == standing
    assert (store.local_copy(artifact) / "sub/b.txt").read_text() == "more"
    assert sorted(os.listdir(tmp_path / f"store/stages/{FINGERPRINT}")) == ["0", "1"]


def commit(store: Storage, made: CommitRecord) -> CommitRecord:
    """As the next attempt of the stage."""
    number = len(store.attempts.entries(made.fingerprint))
    holder = Holder(id=uuid.uuid4().hex, process="test")
    return store.commit(store.attempts.hold(made.fingerprint, holder, number), made)


def test_equal_content_is_stored_once(store: Storage, tmp_path: Path) -> None:
    first = store.publish(output(tmp_path / "one"), "model")
    inode = (Path(first.uri) / "a.txt").stat().st_ino
    assert store.publish(output(tmp_path / "two"), "model") == first
    assert store.publish(output(tmp_path / "three"), "model").digest == first.digest
    assert (Path(first.uri) / "a.txt").stat().st_ino == inode
    assert os.listdir(tmp_path / "store/artifacts/model") == [first.digest]
    assert not any((tmp_path / name).exists() for name in ("one", "two", "three"))


def test_publishing_from_another_file_system(
    store: Storage, tmp_path: Path, other_disk: Path
) -> None:
    near = store.publish(output(tmp_path / "near"), "model")
    shutil.rmtree(Path(near.uri))
    far = store.publish(output(other_disk / "far"), "model")
    assert far == near
    assert store.local_copy(far).is_dir()
    assert not (other_disk / "far").exists()
    assert os.listdir(tmp_path / "store/artifacts/model") == [far.digest]


def test_the_latest_commit_stands_and_a_token_finds_its_own(store: Storage, tmp_path: Path) -> None:
    first = record(store.publish(output(tmp_path / "one", "x"), "model"))
    commit(store, first)
    holder = Holder(id="forced", process="test")
    attempt = store.attempts.hold(FINGERPRINT, holder, 2, "again")
    assert store.lookup(FINGERPRINT) == first
    second = record(store.publish(output(tmp_path / "two", "y"), "model"), attempt=2)
    store.commit(attempt, second)
    assert store.lookup(FINGERPRINT) == second
    assert store.lookup(FINGERPRINT, "again") == second
    assert store.lookup(FINGERPRINT, "never") is None


def _publish_and_commit(store_root: Path, source: Path, number: int, start: Any, out: Any) -> None:
    store = LocalStorage(store_root)
    start.wait(60)
    artifact = store.publish(source, "model")
    holder = Holder(id=str(number), process="test")
    try:
        attempt = store.attempts.hold(FINGERPRINT, holder, 0)
        out.put((artifact.digest, store.commit(attempt, record(artifact)).model_dump_json()))
    except FencedError:
        out.put((artifact.digest, None))


@pytest.mark.parametrize("texts", [("same",) * 4, ("a", "b", "c", "d")])
def test_of_processes_at_once_one_commits_the_others_are_fenced(
    tmp_path: Path, texts: tuple[str, ...]
) -> None:
    context = multiprocessing.get_context("fork")
    start, out = context.Barrier(len(texts)), context.Queue()
    processes = [
        context.Process(
            target=_publish_and_commit,
            args=(tmp_path / "store", output(tmp_path / f"o{i}", text), i, start, out),
        )
        for i, text in enumerate(texts)
    ]
    for process in processes:
        process.start()
    results = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(texts)
    digests, standing = {digest for digest, _ in results}, {line for _, line in results}
    assert len(digests) == len(set(texts))
    committed = LocalStorage(tmp_path / "store").lookup(FINGERPRINT)
    assert committed is not None
    assert standing == {committed.model_dump_json(), None}
    assert [line is not None for _, line in results].count(True) == 1


@pytest.mark.parametrize(
    "damage", ["flip", "remove file", "remove manifest", "remove all", "other"]
)
def test_a_damaged_output_of_a_finished_stage_raises(
    store: Storage, tmp_path: Path, damage: str
) -> None:
    artifact = store.publish(output(tmp_path / "out"), "model")
    commit(store, record(artifact))
    directory = Path(artifact.uri)
    if damage == "flip":
        (directory / "a.txt").write_text("weightz")
    elif damage == "remove file":
        (directory / "a.txt").unlink()
    elif damage == "remove manifest":
        (directory / "manifest.json").unlink()
    elif damage == "remove all":
        shutil.rmtree(directory)
    else:
        # A directory that is sound in itself, under the name of another one.
        other = store.publish(output(tmp_path / "out", "else"), "model")
        shutil.rmtree(directory)
        Path(other.uri).rename(directory)
    # A look-up reads the manifest, a run that reuses looks at sizes, who reads looks at bytes.
    if "file" in damage or damage == "flip":
        assert store.lookup(FINGERPRINT) is not None
    else:
        with pytest.raises(ArtifactCorruptError, match=r"is committed, but its output is damaged"):
            store.lookup(FINGERPRINT)
    if damage != "flip":
        with pytest.raises(ArtifactError):
            store.verify(artifact, "size")
    with pytest.raises(ArtifactError):
        store.local_copy(artifact)


def test_publishing_the_content_again_heals_a_damaged_artifact(
    store: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = store.publish(output(tmp_path / "out"), "model")
    commit(store, record(artifact))
    (Path(artifact.uri) / "a.txt").write_text("weightz")
    assert store.publish(output(tmp_path / "again"), "model") == artifact
    assert "replacing a damaged artifact" in caplog.text
    assert store.lookup(FINGERPRINT) == record(artifact)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"fingerprint": "', b"\x00" * 50])
def test_a_damaged_record_raises(store: Storage, tmp_path: Path, data: bytes) -> None:
    artifact = store.publish(output(tmp_path / "out"), "model")
    commit(store, record(artifact))
    (tmp_path / f"store/stages/{FINGERPRINT}/1").write_bytes(data)
    store = open_storage(store.uri)
    with pytest.raises(ArtifactCorruptError, match="is no entry of a stage log"):
        store.lookup(FINGERPRINT)
    with pytest.raises(ArtifactCorruptError):
        commit(store, record(artifact))


def test_a_record_under_a_wrong_name_raises(store: Storage, tmp_path: Path) -> None:
    commit(store, record(store.publish(output(tmp_path / "out"), "model")))
    log = tmp_path / "store/stages"
    shutil.copytree(log / FINGERPRINT, log / OTHER)
    with pytest.raises(ArtifactCorruptError, match="is entry 1 of f"):
        store.lookup(OTHER)
    (log / FINGERPRINT / "0").unlink()
    with pytest.raises(ArtifactCorruptError, match=r"has entries \[1\]; restore the others"):
        store.lookup(FINGERPRINT)


def test_a_read_error_is_not_absence(store: Storage, tmp_path: Path) -> None:
    artifact = store.publish(output(tmp_path / "out"), "model")
    commit(store, record(artifact))
    path = tmp_path / f"store/stages/{FINGERPRINT}/1"
    path.unlink()
    path.mkdir()  # reading it fails with EISDIR, for every user
    with pytest.raises(IsADirectoryError):
        open_storage(store.uri).lookup(FINGERPRINT)


def test_commit_needs_the_artifact(store: Storage, tmp_path: Path) -> None:
    artifact = store.publish(output(tmp_path / "out"), "model")
    shutil.rmtree(Path(artifact.uri))
    with pytest.raises(ArtifactNotFoundError):
        commit(store, record(artifact))
    assert store.lookup(FINGERPRINT) is None


def test_a_moved_store_still_answers(store: Storage, tmp_path: Path) -> None:
    artifact = store.publish(output(tmp_path / "out"), "model")
    commit(store, record(artifact))
    (tmp_path / "store").rename(tmp_path / "moved")
    moved = LocalStorage(tmp_path / "moved")
    committed = moved.lookup(FINGERPRINT)
    assert committed is not None
    assert Path(committed.artifact.uri).parent == tmp_path / "moved/artifacts/model"
    assert moved.local_copy(artifact) == Path(committed.artifact.uri)


def test_bad_input_row_30_changed_external_input_is_noticed(store: Storage, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n")
    artifact = external_artifact(path)
    assert store.local_copy(artifact) == path
    path.write_text("{ }\n")
    with pytest.raises(ArtifactCorruptError, match="changed after it was planned"):
        open_storage(store.uri).local_copy(artifact)


@pytest.mark.parametrize("value", ["", "..", "a/b", "../x", ".hidden", "a\n"])
def test_names_cannot_leave_the_store(store: Storage, tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        store.lookup(value)
    with pytest.raises(ArtifactError, match="should match pattern"):
        store.publish(output(tmp_path / "out"), value)
    with pytest.raises(ValueError, match="artifact:"):
        store.local_copy(Artifact(kind="model", uri="/", digest=value))


def test_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage(f"{tmp_path}/s").uri == f"{tmp_path}/s"
    assert open_storage("s").uri == f"{tmp_path}/s"
    assert open_storage(f"file://{tmp_path}/with%20space").uri == f"{tmp_path}/with space"
    for uri in ("", "file://host/x", "http://x"):
        with pytest.raises(ConfigError, match=r"^storage: got .*need a directory"):
            open_storage(uri)


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


def test_lookup_and_publish_read_no_already_hashed_bytes(tmp_path: Path) -> None:
    """An artifact of 20 GB, which a writer hashed while it wrote it."""
    uri = str(tmp_path / "store")
    store = open_storage(uri)
    source = tmp_path / "out"
    source.mkdir()
    with (source / "weights").open("wb") as file:
        file.truncate(20 * 10**9)
    before = bytes_read()
    commit(store, record(store.publish(source, "model", {"weights": "0" * 64})))
    found = open_storage(uri).lookup(FINGERPRINT)
    assert found is not None
    store.verify(found.artifact, "size")
    assert bytes_read() - before < 1_000_000


def test_bytes_are_verified_once_by_a_process(store: Storage, tmp_path: Path) -> None:
    source = tmp_path / "out"
    source.mkdir()
    (source / "weights").write_bytes(bytes(5_000_000))
    artifact = store.publish(source, "model")
    before = bytes_read()
    for _ in range(5):
        store.local_copy(artifact)
    assert 5_000_000 <= bytes_read() - before < 6_000_000


def test_a_large_external_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.setattr(artifacts, "SETTLED_NS", -1)
    path = tmp_path / "weights"
    path.write_bytes(bytes(5_000_000))
    first = external_artifact(path)
    before = bytes_read()
    assert external_artifact(path) == first
    assert bytes_read() - before < 1_000_000
    written = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(written, written))
    assert external_artifact(path).digest != first.digest
