"""Jobs on a real Ray head that we embed: authentication, one job per key, attempts, clean end."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra import env
from infra.errors import ConfigError, JobSubmitError, ServiceError
from infra.host import servers
from infra.host.servers import ServerRecord
from infra.ray.api import RayApi
from infra.ray.cluster import Cluster, ensure_cluster
from infra.ray.embedded import is_ready
from infra.ray.job_types import JobHandle, JobRequest, JobState
from infra.ray.jobs import RayJobs
from infra.waiting import wait_for

JOB_DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
    before = {name: os.environ.pop(name, None) for name in names}
    home = tmp_path_factory.mktemp("ray-home")
    try:
        yield home
    finally:
        servers.end(home, "ray")
        for name, value in before.items():
            env.set_for_process(name, value)


@pytest.fixture(scope="module")
def cluster(home: Path) -> Cluster:
    return ensure_cluster(home)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> RayJobs:
    return RayJobs(cluster)


def _request(code: str, **metadata: str) -> Callable[[int], JobRequest]:
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    return lambda attempt: JobRequest(argv, {"ATTEMPT": str(attempt)}, metadata)


def _always(_attempt: int) -> bool:
    return True


def _never(_attempt: int) -> bool:
    return False


def _running(jobs: RayJobs, job: JobHandle) -> None:
    wait_for(
        lambda: jobs.status(job.submission_id).state == JobState.RUNNING,
        f"{job.submission_id} to run",
        JOB_DEADLINE_S,
    )


def _family(record: ServerRecord) -> list[psutil.Process]:
    assert record.process is not None
    leader = psutil.Process(record.process.pid)
    return [leader, *leader.children(recursive=True)]


def test_nobody_gets_an_answer_without_the_token(home: Path, cluster: Cluster) -> None:
    token_path = home / "ray_token"
    assert stat.S_IMODE(token_path.stat().st_mode) == 0o600
    for path in ("/api/version", "/api/jobs/"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(cluster.jobs_url + path, timeout=10)
        assert refused.value.code == 401
        refused.value.close()
    with pytest.raises(ConfigError, match="answered 40[13]; set RAY_AUTH_TOKEN_PATH"):
        RayApi(cluster.jobs_url, "0" * 64).call("GET", "/api/jobs/")
    assert cluster.api.call("GET", "/api/jobs/") is not None


def test_every_server_of_the_head_listens_on_loopback(home: Path, jobs: RayJobs) -> None:
    jobs.wait(jobs.ensure("loopback", _request("pass"), _always).submission_id, JOB_DEADLINE_S)
    record = servers.load(home, "ray")
    assert record is not None
    pids = {process.pid for process in _family(record)}
    listening = {
        c.laddr.ip
        for c in psutil.net_connections("tcp")
        if c.pid in pids and c.status == psutil.CONN_LISTEN and c.laddr
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_second_submission_attaches_to_the_first(jobs: RayJobs, tmp_path: Path) -> None:
    code = f"""
        import time
        open({str(tmp_path / "starts")!r}, "a").write("x")
        time.sleep(2)
        print("said by the job")
    """
    handles: list[JobHandle] = []
    threads = [
        threading.Thread(
            target=lambda: handles.append(
                jobs.ensure("twice", _request(code, flow_run_id="f1"), _always)
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=JOB_DEADLINE_S)
    assert sorted(h.attached for h in handles) == [False, True, True, True]
    assert {h.submission_id for h in handles} == {"twice-a0"}
    found = jobs.find({"flow_run_id": "f1"})
    assert [job.submission_id for job in found] == ["twice-a0"]
    assert jobs.find({"flow_run_id": "other"}) == []
    status = jobs.wait("twice-a0", JOB_DEADLINE_S)
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)
    assert (tmp_path / "starts").read_text() == "x"
    assert "said by the job" in jobs.log_tail("twice-a0", 3)
    with pytest.raises(JobSubmitError, match="twice-a0 already exists"):
        jobs.submit("twice-a0", _request("pass")(0))


def test_a_killed_or_failed_job_is_followed_by_the_next_attempt(
    jobs: RayJobs, tmp_path: Path
) -> None:
    code = f"""
        import os, sys, time
        attempt = os.environ["ATTEMPT"]
        open({str(tmp_path)!r} + "/pid-" + attempt, "w").write(str(os.getpid()))
        if attempt == "1":
            sys.exit(3)
        time.sleep(60 if attempt == "0" else 0)
    """
    first = jobs.ensure("again", _request(code), _always)
    pid_path = tmp_path / "pid-0"
    pid = int(wait_for(lambda: pid_path.exists() and pid_path.read_text(), "pid", JOB_DEADLINE_S))
    os.kill(pid, signal.SIGKILL)
    killed = jobs.wait(first.submission_id, JOB_DEADLINE_S)
    assert (killed.state, killed.exit_code) == (JobState.FAILED, -signal.SIGKILL)

    second = jobs.ensure("again", _request(code), _always)
    assert second == JobHandle(1, "again-a1", attached=False)
    failed = jobs.wait(second.submission_id, JOB_DEADLINE_S)
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 3)

    third = jobs.ensure("again", _request(code), _always, first_attempt=1)
    assert third.attempt == 2
    assert jobs.wait(third.submission_id, JOB_DEADLINE_S).state == JobState.SUCCEEDED
    with pytest.raises(JobSubmitError, match="all of 2 attempts"):
        jobs.ensure("again", _request(code), _always, max_attempts=2)


def test_a_running_job_without_a_heartbeat_is_stopped_and_replaced(jobs: RayJobs) -> None:
    code = "import time; time.sleep(60)"
    first = jobs.ensure("silent", _request(code), _always)
    _running(jobs, first)
    young = jobs.ensure("silent", _request(code), _never, start_grace_s=600)
    assert young == JobHandle(0, "silent-a0", attached=True)
    second = jobs.ensure("silent", _request(code), _never, start_grace_s=0)
    assert second == JobHandle(1, "silent-a1", attached=False)
    assert jobs.status("silent-a0").state == JobState.STOPPED
    _running(jobs, second)
    assert jobs.stop("silent-a1").state == JobState.STOPPED


def test_a_stalled_attempt_is_stopped_before_the_next_number_is_used(jobs: RayJobs) -> None:
    code = "import time; time.sleep(60)"
    stalled = jobs.ensure("stalled", _request(code), _always)
    _running(jobs, stalled)
    following = jobs.ensure("stalled", _request(code), _always, first_attempt=1)
    assert following == JobHandle(1, "stalled-a1", attached=False)
    assert jobs.status("stalled-a0").state == JobState.STOPPED
    assert jobs.stop("stalled-a1").state == JobState.STOPPED


def test_a_job_gets_directory_arguments_and_environment_untouched_by_a_shell(
    jobs: RayJobs, tmp_path: Path
) -> None:
    directory = tmp_path / "with space; and 'quote'"
    directory.mkdir()
    code = "import os, sys; print(repr((os.getcwd(), sys.argv[1:], os.environ['GREETING'])))"
    argument = "$HOME `id` \"x\" 'y'"
    handle = jobs.ensure(
        "shell",
        lambda _: JobRequest(
            [sys.executable, "-c", code, argument], {"GREETING": "a b"}, {}, cwd=directory
        ),
        _always,
    )
    assert jobs.wait(handle.submission_id, JOB_DEADLINE_S).state == JobState.SUCCEEDED
    assert repr((str(directory), [argument], "a b")) in jobs.logs(handle.submission_id)


def test_unknown_jobs_and_addresses_are_named(jobs: RayJobs, tmp_path: Path) -> None:
    with pytest.raises(JobSubmitError, match="knows no job nobody"):
        jobs.status("nobody")
    with pytest.raises(ConfigError, match=r"ray\.address: got 'auto'; need the dashboard"):
        ensure_cluster(tmp_path, "auto")
    with pytest.raises(ServiceError, match="does not answer"):
        ensure_cluster(tmp_path, "http://127.0.0.1:1")


def test_an_existing_cluster_by_address_is_used_and_never_stopped(
    home: Path, cluster: Cluster, tmp_path: Path
) -> None:
    existing = ensure_cluster(tmp_path, cluster.jobs_url)
    assert not existing.started
    assert RayJobs(existing).find({}) == RayJobs(cluster).find({})
    assert existing.release() is False
    record = servers.load(home, "ray")
    assert record is not None
    assert record.is_running


def test_a_second_process_shares_the_head_and_its_release_leaves_it(
    home: Path, cluster: Cluster
) -> None:
    code = f"""
        from pathlib import Path
        import sys
        from infra.ray.cluster import ensure_cluster
        cluster = ensure_cluster(Path({str(home)!r}))
        print(cluster.jobs_url, cluster.started, "ray" in sys.modules, cluster.release())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [cluster.jobs_url, "False", "False", "False"]


def test_the_official_client_works_where_the_cluster_was_asked_for(
    cluster: Cluster, home: Path
) -> None:
    # A process of its own: Ray reads once whether it has to authenticate, and keeps that.
    code = f"""
        from pathlib import Path
        from infra.ray.cluster import ensure_cluster
        cluster = ensure_cluster(Path({str(home)!r}))
        from ray.job_submission import JobSubmissionClient
        client = JobSubmissionClient(cluster.jobs_url)
        print(*sorted(job.submission_id for job in client.list_jobs() if job.submission_id))
        cluster.release()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert set(done.stdout.split()) == {job.submission_id for job in RayJobs(cluster).find({})}


def test_zz_release_leaves_no_process_not_even_of_a_running_job(
    home: Path, cluster: Cluster, jobs: RayJobs
) -> None:
    job = jobs.ensure("left", _request("import time; time.sleep(600)"), _always)
    _running(jobs, job)
    record = servers.load(home, "ray")
    assert record is not None
    assert record.process is not None
    temp_dir = next(a for a in record.process.argv if a.startswith("--temp-dir=")).split("=")[1]
    family = _family(record)
    assert len(family) > 5
    assert cluster.release() is False, "the job goes on"
    again = ensure_cluster(home)
    assert not again.started
    started = time.monotonic()
    assert again.release(with_jobs=True) is True
    assert time.monotonic() - started < 15
    gone, alive = psutil.wait_procs(family, timeout=1)
    assert alive == []
    assert [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if p.status() != psutil.STATUS_ZOMBIE and temp_dir in " ".join(p.info["cmdline"] or [])
    ] == []
    assert servers.load(home, "ray") is None
    assert cluster.release() is False


@pytest.mark.slow
@pytest.mark.exclusive
def test_zz_two_starters_make_one_head_and_a_killed_owner_gives_it_away(tmp_path: Path) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        from infra.ray.cluster import ensure_cluster
        print(ensure_cluster(Path({str(tmp_path)!r})).started, flush=True)
        time.sleep(600)
    """
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        answers = sorted(
            starter.stdout.readline().strip() for starter in starters if starter.stdout
        )
        assert answers == ["False", "True"]
        for starter in starters:
            starter.kill()
            starter.wait()
        record = servers.load(tmp_path, "ray")
        assert record is not None
        assert record.process is not None
        assert record.is_running, "jobs of a killed run go on"
        heir = ensure_cluster(tmp_path)
        assert not heir.started
        # A head that is killed without a word leaves a job behind in a session of its own.
        pid_path = tmp_path / "pid"
        code = f"""
            import os, time
            open({str(pid_path)!r}, "w").write(str(os.getpid()))
            time.sleep(600)
        """
        RayJobs(heir).ensure("orphan", _request(code), _always)
        pid = int(wait_for(lambda: pid_path.exists() and pid_path.read_text(), "pid", 90.0))
        driver = psutil.Process(pid)
        os.kill(record.process.pid, signal.SIGKILL)
        wait_for(lambda: not record.is_running, "the head's death", 10.0)
        heir = ensure_cluster(tmp_path)
        assert heir.started
        assert not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE
        assert is_ready(servers.load(tmp_path, "ray") or record)
        assert heir.release() is True
    finally:
        for starter in starters:
            starter.kill()
            starter.wait()
            if starter.stdout:
                starter.stdout.close()
        servers.end(tmp_path, "ray")
