"""Who owns a stage, with real jobs: races on one Ray, and a holder that is stopped in publish."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from racing import Followers

from engines.config.stages import PromoteConfig, PromoteStageConfig
from infra import env
from infra.host import servers
from infra.ray.cluster import ensure_cluster
from infra.ray.job_types import JobState, JobStatus
from infra.ray.jobs import RayJobs
from infra.store.canonical import canonical_json
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, StageSpec
from infra.store.storage import LocalStorage, Storage, open_storage
from infra.waiting import wait_for
from tasks.runner.identity import StageRequest

NUM_ROUNDS = int(os.environ.get("RACE_ROUNDS", "20"))
NUM_FOLLOWERS = 10
NUM_LANES = 2
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


@pytest.fixture
def two_homes(tmp_path: Path) -> Iterator[list[RayJobs]]:
    """Job clients of two homes that share one Ray."""
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
    before = {name: os.environ.pop(name, None) for name in names}
    home = tmp_path / "first"
    try:
        first = ensure_cluster(home)
        yield [RayJobs(first), RayJobs(ensure_cluster(tmp_path / "second", first.jobs_url))]
    finally:
        servers.end(home, "ray")
        for name, value in before.items():
            env.set_for_process(name, value)


@pytest.mark.stacks
def test_ten_followers_of_two_homes_make_one_body_and_one_commit(
    two_homes: list[RayJobs], tmp_path: Path
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
        assert _the_one_job(two_homes[0], request.fingerprint).state == JobState.SUCCEEDED


def _the_one_job(jobs: RayJobs, fingerprint: str) -> JobStatus:
    """The last status of a stage's job, after a look that there is one only."""
    (name,) = [
        job["submission_id"]
        for job in jobs.api.call("GET", "/api/jobs/")
        if (job["metadata"] or {}).get("fingerprint") == fingerprint
    ]

    def ended() -> JobStatus | None:
        status = jobs.status(name)
        return status if status.is_terminal else None

    return wait_for(ended, f"{name} to end", 60)


def test_a_holder_that_was_stopped_inside_publish_ends_fenced(tmp_path: Path) -> None:
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
