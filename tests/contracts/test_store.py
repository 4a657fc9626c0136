"""The contract of a store: artifacts, stage logs and work channels, whatever form they have.

    pytest tests/contracts/test_store.py --store /a/directory

Covered: equal content has one name; a look-up finds the latest commit; of several claims of one
entry one succeeds; a woken writer neither commits nor adds to the journal; a forced result is the
next generation, and so are attempts that adopt other work; followers join and leave; errors, beats
and specifications arrive as written; pruning takes what only the unfinished need.
Not covered: how long any of it takes, and what a power loss leaves.
"""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf.testing.s3_server import BUCKET, environment, s3_server

from infra.errors import ArtifactNotFoundError, ConfigError, FencedError
from infra.store.heartbeat import Heartbeat
from infra.store.process_stamp import own_stamp
from infra.store.s3 import mirror
from infra.store.stage_log import Attempt, Holder, generation
from infra.store.stage_spec import Adoption, CommitRecord, StageSpec
from infra.store.storage import Storage, open_storage
from infra.store.work_channel import SAMPLES_DIR, JobProblem
from infra.tracking.journal import Journal, read_journal
from infra.tracking.samples import KeptSample, KeptStep, read_samples, write_samples


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["directory", "bucket"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the store under test; by default a new one of each form."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    named = request.config.getoption("--store", default=None)
    if named and request.param == "bucket":
        pytest.skip("needs no second store: --store names the one")
    if named or request.param == "directory":
        return named or str(tmp_path / "store")
    for name, value in environment(request.getfixturevalue("endpoint")).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def store(uri: str, tmp_path: Path) -> Iterator[Storage]:
    yield open_storage(uri)
    mirror.end_below(tmp_path)  # which a process otherwise ships until its end


@pytest.fixture
def fingerprint() -> str:
    """Of a stage that nobody ever asked for."""
    return uuid.uuid4().hex * 2


def holder() -> Holder:
    return Holder(id=uuid.uuid4().hex, process=own_stamp())


def files(tmp_path: Path, text: str) -> Path:
    directory = tmp_path / uuid.uuid4().hex
    (directory / "sub").mkdir(parents=True)
    (directory / "sub/a.txt").write_text(text)
    return directory


def commit(store: Storage, tmp_path: Path, attempt: Attempt, text: str) -> CommitRecord:
    return store.commit(
        attempt,
        CommitRecord(
            fingerprint=attempt.fingerprint,
            stage="sft",
            artifact=store.publish(files(tmp_path, text), "model"),
            attempt=attempt.number,
            committed_at="2026-01-01T00:00:00+00:00",
        ),
    )


def journal(store: Storage, fingerprint: str, attempt: int) -> Journal:
    """As a job opens it."""
    directory = store.channel(fingerprint).local_dir(attempt)
    return Journal(directory / "journal.jsonl", read_journal(store, fingerprint)[0])


def test_equal_content_has_one_name_and_is_read_back(store: Storage, tmp_path: Path) -> None:
    text = uuid.uuid4().hex
    first = store.publish(files(tmp_path, text), "model")
    again = store.publish(files(tmp_path, text), "model")
    assert (first.digest, first.uri) == (again.digest, again.uri)
    assert store.publish(files(tmp_path, text), "dataset").digest != first.digest
    assert (store.local_copy(first) / "sub/a.txt").read_text() == text
    for level in ("manifest", "size", "bytes"):
        store.verify(first, level)
    absent = first.model_copy(update={"digest": "0" * 64})
    with pytest.raises(ArtifactNotFoundError):
        store.verify(absent, "manifest")
    with pytest.raises(ArtifactNotFoundError):
        store.local_copy(absent)


def test_a_commit_is_found_from_anywhere(
    store: Storage, uri: str, fingerprint: str, tmp_path: Path
) -> None:
    assert store.lookup(fingerprint) is None
    attempt = store.attempts.hold(fingerprint, holder(), 0)
    assert store.lookup(fingerprint) is None
    record = commit(store, tmp_path, attempt, "x")
    assert open_storage(uri).lookup(fingerprint) == record
    assert record.artifact.fingerprint == fingerprint
    assert open_storage(uri).name == store.name


def test_a_store_shows_that_two_cannot_own_one_name(store: Storage, uri: str) -> None:
    assert store.probe().startswith(f"{uri}")
    assert store.probe().endswith("of two creates of one name the second is refused")


def test_of_many_claims_of_one_entry_one_succeeds(uri: str, fingerprint: str) -> None:
    outcomes: list[bool] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        store = open_storage(uri)
        barrier.wait(60)
        try:
            store.attempts.hold(fingerprint, holder(), 0)
            outcomes.append(True)
        except FencedError:
            outcomes.append(False)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == [False] * 7 + [True]


def test_resumed_holder_is_fenced_and_its_late_journal_ignored(
    store: Storage, uri: str, fingerprint: str, tmp_path: Path
) -> None:
    stopped = store.attempts.hold(fingerprint, holder(), 0)
    with journal(store, fingerprint, 0) as old:
        old.metrics(1, {"loss": 1.0})
        second = open_storage(uri)
        heir = second.attempts.hold(fingerprint, holder(), 1)
        with journal(second, fingerprint, 1) as new:
            assert not new.metrics(1, {"loss": 1.0})
            new.metrics(2, {"loss": 0.5})
            old.metrics(2, {"loss": 0.7})
            old.metrics(3, {"loss": 0.6})
            with pytest.raises(FencedError):
                store.attempts.check(stopped)
            with pytest.raises(FencedError, match="is taken: held by"):
                commit(store, tmp_path, stopped, "old")
            record = commit(second, tmp_path, heir, "new")
            new.metrics(3, {"loss": 0.4})
    with pytest.raises(FencedError, match="is taken"):
        commit(store, tmp_path, stopped, "old")
    assert store.lookup(fingerprint) == record
    counted, _ = read_journal(store, fingerprint)
    assert [(r.step, r.values["loss"]) for r in counted] == [(1, 1.0), (2, 0.5)]
    segments = store.attempts.journal_segments(fingerprint)
    assert [segment.attempt for segment in segments] == [0, 1]


def test_the_journal_is_read_on_from_where_it_was_left(store: Storage, fingerprint: str) -> None:
    store.attempts.hold(fingerprint, holder(), 0)
    with journal(store, fingerprint, 0) as first:
        first.metrics(1, {"loss": 1.0})
        found, positions = read_journal(store, fingerprint)
        assert [r.step for r in found] == [1]
        first.metrics(2, {"loss": 1.0})
    store.attempts.hold(fingerprint, holder(), 1)
    with journal(store, fingerprint, 1) as second:
        second.metrics(3, {"loss": 1.0})
    found, positions = read_journal(store, fingerprint, positions)
    assert [r.step for r in found] == [2, 3]
    assert read_journal(store, fingerprint, positions) == ([], positions)


def test_a_forced_result_is_the_next_generation_and_stands(
    store: Storage, fingerprint: str, tmp_path: Path
) -> None:
    first = commit(store, tmp_path, store.attempts.hold(fingerprint, holder(), 0), "first")
    with journal(store, fingerprint, 0) as old:
        old.metrics(9, {"loss": 9.0})
    forced = store.attempts.hold(fingerprint, holder(), 2, "again")
    assert store.lookup(fingerprint) == first, "until the forced one is there"
    assert read_journal(store, fingerprint)[0] == []
    heir = store.attempts.hold(fingerprint, holder(), 3)
    with pytest.raises(FencedError):
        commit(store, tmp_path, forced, "second")
    second = commit(store, tmp_path, heir, "second")
    assert store.lookup(fingerprint) == second
    assert store.lookup(fingerprint, "again") == second
    assert store.lookup(fingerprint, "another token") is None
    assert commit(store, tmp_path, heir, "second") == second, "a lost answer is asked for again"


def test_adopting_generation_has_its_own_steps_and_journal(
    store: Storage, fingerprint: str, tmp_path: Path
) -> None:
    store.attempts.hold(fingerprint, holder(), 0)
    with journal(store, fingerprint, 0) as old:
        old.metrics(1, {"loss": 9.0})
    adopted = Adoption(
        fingerprint="ab" * 32, generation=0, step=7, digest="cd" * 32, differs=("a.module",)
    )
    store.attempts.hold(fingerprint, holder(), 1, adopted=adopted)
    assert read_journal(store, fingerprint)[0] == []
    heir = store.attempts.hold(fingerprint, holder(), 2)
    first, _ = generation(store.attempts.entries(fingerprint))
    assert (first.number, first.adopted) == (1, adopted)
    assert [entry.number for entry in generation(store.attempts.entries(fingerprint), 0)] == [0]
    channel = store.channel(fingerprint)
    assert channel.steps_dir(1, adopted) != channel.steps_dir(1)
    (channel.steps_dir(1, adopted) / "step-00000007").mkdir(parents=True)
    assert fingerprint in store.with_steps()
    with journal(store, fingerprint, 2) as new:
        new.metrics(8, {"loss": 1.0})
    assert [record.step for record in read_journal(store, fingerprint)[0]] == [8]
    commit(store, tmp_path, heir, "result")
    assert store.lookup(fingerprint) is not None
    assert generation(store.attempts.entries(fingerprint))[0].adopted == adopted


def test_committed_generation_is_pruned_but_keeps_its_records(
    store: Storage, uri: str, fingerprint: str, tmp_path: Path
) -> None:
    channel = store.channel(fingerprint)
    for number in (0, 1):
        last = store.attempts.hold(fingerprint, holder(), number)
        with journal(store, fingerprint, number) as written:
            written.metrics(number, {"loss": 1.0})
        for name in ("hf/model.safetensors", "judge/replica-0.log", "judge/hf/config.json"):
            path = channel.local_dir(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    channel.write_error(0, JobProblem(type="Killed", message="of it", exit_code=1))
    adopted = Adoption(fingerprint="ab" * 32, generation=0, step=1, digest="cd" * 32, differs=("",))
    for steps in (channel.steps_dir(0), channel.steps_dir(2, adopted)):
        (steps / "step-00000001").mkdir(parents=True)
    commit(store, tmp_path, last, "done")
    for _ in range(2):
        channel.prune([0, 1], channel.steps_dir(0))
        assert not channel.steps_dir(0).exists()
        assert channel.steps_dir(2, adopted).exists(), "of another generation"
        for number in (0, 1):
            kept = channel.local_dir(number).rglob("*")
            names = {str(path.relative_to(channel.local_dir(number))) for path in kept}
            assert names - {"error.json"} == {"journal.jsonl", "judge", "judge/replica-0.log"}
        elsewhere = open_storage(uri)
        assert [record.step for record in read_journal(elsewhere, fingerprint)[0]] == [0, 1]
        assert elsewhere.channel(fingerprint).read_error(0) is not None


def test_samples_of_steps_are_read_once_and_outlive_the_commit(
    store: Storage, uri: str, fingerprint: str, tmp_path: Path
) -> None:
    """The second attempt repeats step 2, as after a kill."""
    for number, steps in ((0, (1, 2)), (1, (2, 3))):
        last = store.attempts.hold(fingerprint, holder(), number)
        for step in steps:
            sample = KeptSample(
                name=f"attempt {number}",
                group=0,
                prompt="1+1=",
                tokens=("</script>", "\N{SNOWMAN}"),
                num_tokens=2,
                mismatch=(0.5, None),
                score=None,
                reward=None,
                finish_reason="stop",
            )
            kept = KeptStep(step=step, samples=(sample,))
            write_samples(store.channel(fingerprint).local_dir(number), kept)
    damaged = store.channel(fingerprint).local_dir(1) / SAMPLES_DIR / "00000004.json"
    damaged.write_bytes(b"{")
    for is_committed in (False, True):
        if is_committed:
            commit(store, tmp_path, last, "done")
            store.channel(fingerprint).prune([0, 1], store.channel(fingerprint).steps_dir(0))
        found = read_samples(open_storage(uri), fingerprint)
        names = {step: kept[0].name for step, kept in found.items()}
        assert names == {1: "attempt 0", 2: "attempt 1", 3: "attempt 1"}
        assert found[3] == (sample,)


def test_followers_join_and_leave(store: Storage, uri: str, fingerprint: str) -> None:
    mine, theirs = uuid.uuid4().hex, uuid.uuid4().hex
    other = open_storage(uri)
    for _ in range(2):
        store.attempts.join(fingerprint, mine)
        other.attempts.join(fingerprint, theirs)
    assert other.attempts.followed_by(mine) == [fingerprint]
    assert store.attempts.leave(fingerprint, mine) == 1
    assert store.attempts.leave(fingerprint, mine) == 1
    assert other.attempts.leave(fingerprint, theirs) == 0
    assert other.attempts.followed_by(mine) == []


def test_what_job_and_watcher_tell_each_other_arrives(
    store: Storage, uri: str, fingerprint: str
) -> None:
    channel, elsewhere = store.channel(fingerprint), open_storage(uri).channel(fingerprint)
    with pytest.raises(ConfigError, match="does not exist"):
        elsewhere.read_specification(0)
    spec = StageSpec(
        stage="sft", job_module="engines.jobs.sft", fingerprint=fingerprint, attempt=0,
        config={"lr": 0.1}, inputs={}, seed=1, store_uri=uri,
    )  # fmt: skip
    channel.write_specification(spec)
    assert elsewhere.read_specification(0) == spec
    assert elsewhere.read_beat(0) is None
    with Heartbeat(channel.local_dir(0) / "heartbeat", 60) as heartbeat:
        heartbeat.enter("train", 60)
    beat = elsewhere.read_beat(0)
    assert beat is not None
    assert (beat.phase, beat.process) == ("train", own_stamp())
    assert elsewhere.read_error(0) is None
    problem = JobProblem(type="ValueError", message="\u00fc", exit_code=1)
    channel.write_error(0, problem)
    assert elsewhere.read_error(0) == problem
