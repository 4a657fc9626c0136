"""Who owns a stage, with real jobs: races, a full disk, and a holder that is stopped in publish."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from racing import Followers, new_follower

from engines.config.sections import PromoteConfig
from engines.config.stages.base import Runtime
from engines.config.stages.final import PromoteStageConfig
from infra import env
from infra.host import servers
from infra.ray.cluster import Cluster, ensure_cluster
from infra.ray.jobs import RayJobs
from infra.store.canonical import canonical_json
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, StageSpec
from infra.store.storage import LocalStorage, Storage, open_storage
from infra.waiting import wait_for
from tasks.runner import following
from tasks.runner.run import StageRequest

NUM_ROUNDS = int(os.environ.get("RACE_ROUNDS", "20"))
NUM_FOLLOWERS = 10
NUM_LANES = 2
DISK_FULL_S = float(os.environ.get("DISK_FULL_S", "6"))
CONFIG = PromoteStageConfig(promote=PromoteConfig())


def inputs(store: Storage, scratch: Path) -> dict[str, Artifact]:
    published = {}
    for kind, name, content in (
        ("evaluation", "summary.json", {"metrics": {"accuracy": 0.75}}),
        ("model", "config.json", {}),
    ):
        directory = scratch / kind
        directory.mkdir(parents=True)
        (directory / name).write_bytes(canonical_json(content))
        published[kind] = store.publish(directory, kind)
    return published


@pytest.fixture(scope="module")
def two_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    """One Ray as two homes see it."""
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
    before = {name: os.environ.pop(name, None) for name in names}
    homes = tmp_path_factory.mktemp("homes")
    home = homes / "first"
    try:
        first = ensure_cluster(home)
        yield [first, ensure_cluster(homes / "second", first.jobs_url)]
    finally:
        servers.end(home, "ray")
        for name, value in before.items():
            env.set_for_process(name, value)


@pytest.mark.slow
def test_fault_row_18_ten_followers_make_one_job_and_one_commit(
    two_homes: list[Cluster], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    uri = str(tmp_path / "store")
    store = open_storage(uri)
    given = inputs(store, tmp_path / "inputs")
    requests = [StageRequest(CONFIG, given, seed=number) for number in range(NUM_ROUNDS)]
    queue = iter(requests)

    def race(followers: Followers) -> None:
        for request in queue:
            (answer,) = set(followers.want(request))
            assert answer == store.lookup(request.fingerprint).model_dump_json()

    # Most of a round is the start of Ray's processes, which that of another round can fill.
    with contextlib.ExitStack() as stack:
        lanes = [
            stack.enter_context(Followers(two_homes, uri, NUM_FOLLOWERS)) for _ in range(NUM_LANES)
        ]
        with ThreadPoolExecutor(NUM_LANES) as pool:
            list(pool.map(race, lanes))
    for request in requests:
        entries = store.attempts.entries(request.fingerprint)
        assert [entry.kind for entry in entries] == ["held", "committed"]

    bodies = sorted((request.fingerprint, "SUCCEEDED") for request in requests)

    def states() -> list[tuple[str, str]]:
        jobs = two_homes[0].api.call("GET", "/api/jobs/")
        found = sorted((job["metadata"]["fingerprint"], job["status"]) for job in jobs)
        return [state for state in found if state[0] in dict(bodies)]

    wait_for(lambda: states() == bodies, "one job a round to end well", 60)
    record_property("F10", NUM_ROUNDS)


@pytest.mark.slow
def test_fault_row_7_disk_full_beyond_silence_limit_stops_no_job(
    two_homes: list[Cluster], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As 90 s of a full disk are to the 60 s of silence after which a job counts as dead.
    monkeypatch.setattr(following, "HEARTBEAT_STALE_S", DISK_FULL_S * 2 / 3)
    # Time to fill the disk between the job's look and its write.
    faults = "journal.before_write=sleep:3,storage.before_publish=sleep:3"
    monkeypatch.setenv("RLHF_FAULTS", faults)
    store = LocalStorage(small_disk / "store")
    request = StageRequest(CONFIG, inputs(store, small_disk / "inputs"), seed=0)
    attempt = Path(store.uri) / "work" / request.fingerprint / "attempt-0"
    filler = small_disk / "filler"

    def fill(until: Callable[[], bool]) -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(512))
        time.sleep(DISK_FULL_S)
        assert not until()
        filler.unlink()
        wait_for(until, "the job to go on", 60)

    follower = new_follower(request, store.uri, Runtime(heartbeat_s=DISK_FULL_S / 45))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(follower.follow, RayJobs(two_homes[0]), lambda record: None)
        journal = attempt / "journal.jsonl"
        decided = attempt / "output" / "decision.json"
        wait_for(decided.exists, "the job to write its output", 120)
        fill(lambda: journal.stat().st_size > 0)
        fill(lambda: store.lookup(request.fingerprint) is not None)
        assert done.result(60) == store.lookup(request.fingerprint)
    kinds = [entry.kind for entry in store.attempts.entries(request.fingerprint)]
    assert kinds == ["held", "committed"]


def test_fault_row_18_holder_stopped_in_publish_is_fenced(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path / "store")
    given = inputs(store, tmp_path / "inputs")
    fingerprint = "ab" * 32

    def start(attempt: int, **environment: str) -> "subprocess.Popen[str]":
        holder = Holder(id=uuid.uuid4().hex, process="test")
        store.attempts.hold(fingerprint, holder, attempt)
        spec = StageSpec(
            stage="promote", job_module="engines.jobs.promote", fingerprint=fingerprint,
            attempt=attempt, holder=holder.id, config=CONFIG.model_dump(mode="json"),
            inputs=given, seed=0, store_uri=store.uri,
        )  # fmt: skip
        store.channel(fingerprint).write_specification(spec)
        return subprocess.Popen(
            [sys.executable, *spec.job_argv],
            stderr=subprocess.PIPE,
            text=True,
            env=env.child_environment(**environment),
        )

    stopped = start(0, RLHF_FAULTS="artifacts.before_manifest=stop")
    try:
        process = psutil.Process(stopped.pid)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the fault to stop it", 60)
        heir = start(1)
        _, log = heir.communicate(timeout=60)
        assert heir.returncode == 0, log
        record = store.lookup(fingerprint)
        stopped.send_signal(signal.SIGCONT)
        _, log = stopped.communicate(timeout=60)
    finally:
        stopped.kill()
    assert stopped.returncode == 1
    problem = store.channel(fingerprint).read_error(0)
    assert problem is not None
    assert problem.type == "FencedError", log
    fresh = LocalStorage(tmp_path / "store")
    assert fresh.lookup(fingerprint) == record
    assert record is not None
    assert record.attempt == 1
    fresh.verify(record.artifact, "bytes")
    kinds = [entry.kind for entry in fresh.attempts.entries(fingerprint)]
    assert kinds == ["held", "held", "committed"]
