"""What an attempt writes here, read where nothing but the bucket is shared."""

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf.testing.fault_proxy import FaultProxy

from infra import env
from infra.errors import ArtifactCorruptError, FencedError, StoreUnreachableError
from infra.store.heartbeat import BeatWatch, Heartbeat
from infra.store.process_stamp import own_stamp
from infra.store.s3 import mirror
from infra.store.s3.mirror import Chunk, JournalChunks, stretches
from infra.store.s3.objects import Found, Objects, S3Address
from infra.store.s3.storage import S3Storage
from infra.store.stage_log import Holder
from infra.store.work_channel import JobProblem
from infra.tracking.journal import Journal, read_journal

FINGERPRINT = "f" * 64
ATTEMPT = f"work/{FINGERPRINT}/attempt-0"


def elsewhere(uri: str) -> S3Storage:
    """The store as another process sees it, which mirrors nothing."""
    mirror._mirrors.clear()
    return S3Storage(uri)


def wait_until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@given(
    st.lists(st.binary(min_size=1, max_size=5)), st.integers(0, 30), st.none() | st.integers(0, 30)
)
def test_stretches_of_chunks_are_those_of_what_they_join_to(
    parts: list[bytes], start: int, end: int | None
) -> None:
    whole = b"".join(parts)
    offsets = [sum(map(len, parts[:number])) for number in range(len(parts))]
    data = dict(zip(offsets, parts, strict=True))
    chunks = [Chunk(offset, len(part)) for offset, part in data.items()]
    found = [data[chunk.offset][first:last] for chunk, first, last in stretches(chunks, start, end)]
    assert b"".join(found) == (whole[start:] if end is None else whole[start:end])
    assert b"" not in found


def test_two_threads_that_read_on_see_each_chunk_once(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Objects(S3Address.parse(uri))
    writer, reader = JournalChunks(objects, ATTEMPT), JournalChunks(objects, ATTEMPT)
    writer.append(b"one\n")
    reader.refresh()
    writer.append(b"two\n")
    both_asked, listed = threading.Barrier(2), objects.listed

    def listed_at_once(prefix: str, after: str = "") -> list[Found]:
        found = listed(prefix, after)
        with suppress(threading.BrokenBarrierError):
            both_asked.wait(timeout=1.0)
        return found

    monkeypatch.setattr(objects, "listed", listed_at_once)
    with ThreadPoolExecutor(2) as pool:
        read = list(pool.map(lambda _: reader.read(0, None), range(2)))
    assert read == [b"one\ntwo\n"] * 2


def test_beats_and_journal_reach_watcher_without_shared_files(uri: str, tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from infra.store.heartbeat import Heartbeat\n"
        "from infra.store.storage import open_storage\n"
        "from infra.tracking.journal import Journal\n"
        "directory = open_storage(sys.argv[1]).channel(sys.argv[2]).local_dir(0)\n"
        "(directory / 'stacks.txt').write_text('stacks')\n"
        "with Heartbeat(directory / 'heartbeat', 0.1) as heartbeat:\n"
        "    heartbeat.enter('train', 60)\n"
        "    journal = Journal(directory / 'journal.jsonl')\n"
        "    journal.metrics(1, {'loss': 1.0})\n"
        "    sys.stdin.readline()\n"
        "    journal.metrics(2, {'loss': 2.0})\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", program, uri, FINGERPRINT],
        env=env.child_environment(RLHF_HOME=str(tmp_path / "job")),
        stdin=subprocess.PIPE,
        text=True,
    )
    try:
        store = S3Storage(uri)
        store.attempts.hold(FINGERPRINT, Holder(id="me", process=own_stamp()), 0)
        channel = store.channel(FINGERPRINT)
        watch = BeatWatch(lambda: channel.read_beat(0))
        wait_until(lambda: watch.look() >= 0 and watch.beat is not None)
        first = watch.beat
        wait_until(lambda: watch.look() >= 0 and watch.beat != first)
        wait_until(lambda: len(read_journal(store, FINGERPRINT)[0]) == 1)
        job.communicate("\n", timeout=60)  # what is written last goes when the process ends
        assert [record.step for record in read_journal(store, FINGERPRINT)[0]] == [1, 2]
        assert Objects(S3Address.parse(uri)).get(f"{ATTEMPT}/stacks.txt") == b"stacks"
        assert not (tmp_path / "home/remote").exists()
    finally:
        job.kill()
        job.wait(60)


def test_a_journal_goes_on_on_another_machine(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Storage(uri)
    store.attempts.hold(FINGERPRINT, Holder(id="me", process=own_stamp()), 0)
    with Journal(store.channel(FINGERPRINT).local_dir(0) / "journal.jsonl") as journal:
        journal.metrics(1, {"loss": 1.0})
    mirror.ship(store.channel(FINGERPRINT).local_dir(0))
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "other"))
    other = elsewhere(uri)
    path = other.channel(FINGERPRINT).local_dir(0) / "journal.jsonl"
    with Journal(path) as journal:
        assert not journal.metrics(1, {"loss": 1.0})
        journal.metrics(2, {"loss": 1.0})
    assert [record.step for record in read_journal(other, FINGERPRINT)[0]] == [1, 2]
    assert len(Objects(S3Address.parse(uri)).listed(f"{ATTEMPT}/journal/")) == 2


def test_only_whole_lines_are_shipped_and_none_twice(uri: str, proxy: FaultProxy) -> None:
    channel = S3Storage(uri).channel(FINGERPRINT)
    path = channel.local_dir(0) / "journal.jsonl"
    path.write_bytes(b"one\ntw")
    assert channel.read_journal(0) == b"one\n"
    path.write_bytes(b"one\n")  # as a journal that is opened again cuts it
    with path.open("ab") as file:
        file.write(b"2\nthree\n")
    assert channel.read_journal(0) == b"one\n2\nthree\n"
    assert channel.journal_bytes(0) == 12
    assert channel.read_journal(0, 2, 7) == b"e\n2\nt"
    puts = sum(each.method == "PUT" for each in proxy.requests)
    channel.read_journal(0)
    assert sum(each.method == "PUT" for each in proxy.requests) == puts


def test_two_processes_with_one_directory_ship_one_journal(uri: str) -> None:
    objects = Objects(S3Address.parse(uri))
    first, second = JournalChunks(objects, ATTEMPT), JournalChunks(objects, ATTEMPT)
    first.append(b"one\n")
    second.append(b"one\ntwo\n")
    assert second.num_bytes == 4
    second.append(b"two\n")
    assert JournalChunks(objects, ATTEMPT).read(0, None) == b"one\ntwo\n"
    with pytest.raises(ArtifactCorruptError, match=r"0000000000000004 belongs to another journal"):
        first.append(b"other\n")


def test_a_journal_that_lost_a_chunk_is_damaged(uri: str) -> None:
    objects = Objects(S3Address.parse(uri))
    chunks = JournalChunks(objects, ATTEMPT)
    for line in (b"one\n", b"two\n", b"three\n"):
        chunks.append(line)
    objects.delete([f"{ATTEMPT}/journal/{4:016d}"])
    with pytest.raises(ArtifactCorruptError, match="bytes from 4 on are missing"):
        JournalChunks(objects, ATTEMPT).read(0, None)


def test_temporary_service_failure_costs_only_heartbeats(
    uri: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "SHIP_EVERY_S", 0.05)
    channel = S3Storage(uri).channel(FINGERPRINT)
    directory = channel.local_dir(0)
    for method in ("PUT", "GET"):
        proxy.fail(503, method, times=10**6)
    with Heartbeat(directory / "heartbeat", 0.1), Journal(directory / "journal.jsonl") as journal:
        journal.metrics(1, {"loss": 1.0})
        watch = BeatWatch(lambda: channel.read_beat(0))
        for _ in range(2):
            with pytest.raises(StoreUnreachableError):
                watch.look()
        assert watch.silence_s == 0, "a watcher that cannot look knows nothing"
        wait_until(lambda: "cannot upload the records of" in caplog.text)
        proxy.heal()
        assert watch.look() == 0
        assert watch.beat is not None
        assert b'"step":1' in channel.read_journal(0)


def test_what_a_woken_attempt_ships_late_does_not_count(
    uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = S3Storage(uri)
    stopped = store.attempts.hold(FINGERPRINT, Holder(id="old", process=own_stamp()), 0)
    directory = store.channel(FINGERPRINT).local_dir(0)
    with Journal(directory / "journal.jsonl") as journal:
        journal.metrics(1, {"loss": 1.0})
        mirror.ship(directory)
        journal.metrics(2, {"loss": 2.0})  # not shipped, when its machine stood still
    asleep = dict(mirror._mirrors)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "heir"))
    heir = elsewhere(uri)
    heir.attempts.hold(FINGERPRINT, Holder(id="new", process=own_stamp()), 1)
    asleep[directory].ship()
    with pytest.raises(FencedError):
        store.attempts.check(stopped)
    assert b'"step":2' in heir.channel(FINGERPRINT).read_journal(0)
    assert [record.step for record in read_journal(heir, FINGERPRINT)[0]] == [1]


def test_attempt_error_is_reported_although_journal_is_refused(uri: str, proxy: FaultProxy) -> None:
    channel = S3Storage(uri).channel(FINGERPRINT)
    (channel.local_dir(0) / "journal.jsonl").write_bytes(b"one\n")
    proxy.fail(403, "PUT", "/journal/", times=99)
    problem = JobProblem(type="ValueError", message="x", exit_code=1)
    channel.write_error(0, problem)
    assert channel.read_error(0) == problem


def test_followers_that_died_are_not_counted(uri: str) -> None:
    store = S3Storage(uri)
    dead, mine = uuid.uuid4().hex, uuid.uuid4().hex
    program = (
        "import sys; from infra.store.storage import open_storage\n"
        "open_storage(sys.argv[1]).attempts.join(sys.argv[2], sys.argv[3])"
    )
    argv = [sys.executable, "-c", program, uri, FINGERPRINT, dead]
    subprocess.run(argv, check=True, timeout=120)
    store.attempts.join(FINGERPRINT, mine)
    assert store.attempts.followed_by(dead) == [FINGERPRINT]
    assert store.attempts.leave(FINGERPRINT, mine) == 0
    assert store.attempts.followed_by(dead) == []


def test_runs_say_what_they_use(uri: str) -> None:
    store, key = S3Storage(uri), "a" * 64
    runs = store.runs
    runs.begin(key, "nightly")
    runs.begin(key, "another name")
    runs.use(key, FINGERPRINT)
    runs.keep(key, True)
    (known,) = S3Storage(uri).runs.known()
    assert (known.key, known.name, known.kept, [*known.used_at]) == (
        key,
        "nightly",
        True,
        [FINGERPRINT],
    )
    assert abs(known.used_at[FINGERPRINT] - time.time()) < 60
    runs.keep(key, False)
    assert not runs.known()[0].kept
    with store.inventory.exclusively():
        runs.forget(key)
    assert runs.known() == []
