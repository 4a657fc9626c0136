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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rlhf.testing.fault_proxy import fault_proxy

from infra import env
from infra.errors import ConfigError, DeadlineError, JobSubmitError, ServiceError
from infra.host import servers
from infra.host.servers import ServerRecord
from infra.ray.api import JobRequest, JobState, JobStatus, RayApi, existing_token
from infra.ray.cluster import MIN_NUM_CPUS, Cluster, ensure_cluster, is_ready
from infra.ray.jobs import RayJobs, num_nodes
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


def _request(code: str, **metadata: str) -> JobRequest:
    return JobRequest([sys.executable, "-c", textwrap.dedent(code)], {}, metadata)


def _running(jobs: RayJobs, name: str) -> None:
    wait_for(lambda: jobs.status(name).state == JobState.RUNNING, f"{name} to run", JOB_DEADLINE_S)


def _ended(jobs: RayJobs, name: str) -> JobStatus:
    def ended() -> JobStatus | None:
        status = jobs.status(name)
        return status if status.is_terminal else None

    return wait_for(ended, f"{name} to end", JOB_DEADLINE_S)


def _listed(cluster: Cluster) -> set[str]:
    """Drivers that connected by themselves are listed too, without a submission id."""
    return {job["submission_id"] or "" for job in cluster.api.call("GET", "/api/jobs/")} - {""}


def _family(record: ServerRecord) -> list[psutil.Process]:
    assert record.process is not None
    leader = psutil.Process(record.process.pid)
    return [leader, *leader.children(recursive=True)]


def test_bad_input_row_45_request_without_token_is_rejected(home: Path, cluster: Cluster) -> None:
    token_path = home / "ray_token"
    assert stat.S_IMODE(token_path.stat().st_mode) == 0o600
    for path in ("/api/version", "/api/jobs/"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(cluster.jobs_url + path, timeout=60)
        assert refused.value.code == 401
        refused.value.close()
    with pytest.raises(ConfigError, match="answered 40[13]: .*RAY_AUTH_TOKEN_PATH"):
        RayApi(cluster.jobs_url, "0" * 64).call("GET", "/api/jobs/")
    assert cluster.api.call("GET", "/api/jobs/") is not None


def test_every_server_of_the_head_listens_on_loopback(home: Path, jobs: RayJobs) -> None:
    assert jobs.submit("loopback", _request("pass"))
    _ended(jobs, "loopback")
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


def test_of_several_submissions_of_one_name_one_is_taken(jobs: RayJobs, tmp_path: Path) -> None:
    code = f"""
        import time
        open({str(tmp_path / "starts")!r}, "a").write("x")
        time.sleep(2)
        print("said by the job")
    """
    taken: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda: taken.append(jobs.submit("twice", _request(code, flow_run_id="f1")))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=JOB_DEADLINE_S)
    assert sorted(taken) == [False, False, False, True]
    status = _ended(jobs, "twice")
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)
    assert status.metadata["flow_run_id"] == "f1"
    assert (tmp_path / "starts").read_text() == "x"
    assert "said by the job" in jobs.log_tail("twice", 3)
    assert jobs.look("never") is None


def test_fault_row_19_lost_submit_answer_starts_exactly_one_job(
    cluster: Cluster, jobs: RayJobs, tmp_path: Path
) -> None:
    code = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')"
    with fault_proxy(cluster.jobs_url) as proxy:
        proxy.fail("lose answer", "POST", "/api/jobs/")
        through = RayApi(proxy.address, existing_token())
        assert RayJobs(replace(cluster, api=through)).submit("unanswered", _request(code))
        assert [request.method for request in proxy.requests] == ["POST", "POST"]
    assert _ended(jobs, "unanswered").state == JobState.SUCCEEDED
    assert (tmp_path / "starts").read_text() == "x"


def test_how_a_job_ended_is_told(jobs: RayJobs, tmp_path: Path) -> None:
    code = f"""
        import os, time
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """
    assert jobs.submit("killed", _request(code))
    pid_path = tmp_path / "pid"
    pid = int(wait_for(lambda: pid_path.exists() and pid_path.read_text(), "pid", JOB_DEADLINE_S))
    os.kill(pid, signal.SIGKILL)
    killed = _ended(jobs, "killed")
    assert (killed.state, killed.exit_code) == (JobState.FAILED, -signal.SIGKILL)
    assert jobs.submit("failed", _request("import sys; sys.exit(3)"))
    failed = _ended(jobs, "failed")
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 3)
    assert jobs.submit("stopped", _request("import time; time.sleep(60)"))
    _running(jobs, "stopped")
    assert jobs.stop("stopped").state == JobState.STOPPED


def test_job_receives_directory_argv_and_env_without_a_shell(
    jobs: RayJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "with space; and 'quote'"
    directory.mkdir()
    monkeypatch.chdir(directory)
    code = "import os, sys; print(repr((os.getcwd(), sys.argv[1:], os.environ['GREETING'])))"
    argument = "$HOME `id` \"x\" 'y'"
    argv = [sys.executable, "-c", code, argument]
    assert jobs.submit("shell", JobRequest(argv, {"GREETING": "a b"}, {}))
    assert _ended(jobs, "shell").state == JobState.SUCCEEDED
    assert repr((str(directory), [argument], "a b")) in jobs.log_tail("shell")


def test_unknown_jobs_and_addresses_are_named(jobs: RayJobs, tmp_path: Path) -> None:
    with pytest.raises(JobSubmitError, match="knows no job nobody"):
        jobs.status("nobody")
    with pytest.raises(ConfigError, match=r"ray\.address: got 'auto'; need the dashboard"):
        ensure_cluster(tmp_path, "auto")
    with pytest.raises(ServiceError, match="does not answer"):
        ensure_cluster(tmp_path, "http://127.0.0.1:1")


def test_existing_cluster_by_address_is_used_but_not_stopped(
    home: Path, cluster: Cluster, tmp_path: Path
) -> None:
    existing = ensure_cluster(tmp_path, cluster.jobs_url)
    assert not existing.started
    assert _listed(existing) == _listed(cluster)
    assert existing.release() is False
    record = servers.load(home, "ray")
    assert record is not None
    assert record.is_running


def test_second_process_shares_the_head_and_does_not_end_it(home: Path, cluster: Cluster) -> None:
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


def test_official_ray_client_works_after_ensure_cluster(cluster: Cluster, home: Path) -> None:
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
    assert set(done.stdout.split()) == _listed(cluster)


def test_the_nodes_of_a_cluster_are_counted(cluster: Cluster) -> None:
    assert num_nodes(cluster.api) == 1


def test_of_two_jobs_that_need_the_whole_cluster_one_waits(jobs: RayJobs) -> None:
    """As two of one rank on a node with one device."""
    whole = {"num_cpus": max(MIN_NUM_CPUS, len(os.sched_getaffinity(0)))}
    first = _request("import time; time.sleep(600)")._replace(resources=whole)
    second = _request("print('done')")._replace(resources=whole)
    jobs.submit("whole-a-0", first)
    _running(jobs, "whole-a-0")
    jobs.submit("whole-b-0", second)
    with pytest.raises(DeadlineError):
        wait_for(lambda: jobs.status("whole-b-0").state != JobState.PENDING, "a turn", 3.0)
    jobs.stop("whole-a-0")
    assert _ended(jobs, "whole-b-0").state == JobState.SUCCEEDED


def test_zz_release_leaves_no_process_not_even_of_a_running_job(
    home: Path, cluster: Cluster, jobs: RayJobs
) -> None:
    assert jobs.submit("left", _request("import time; time.sleep(600)"))
    _running(jobs, "left")
    record = servers.load(home, "ray")
    assert record is not None
    assert record.process is not None
    temp_dir = next(a for a in record.process.argv if a.startswith("--temp-dir=")).split("=")[1]
    family = _family(record)
    assert len(family) > 5
    assert cluster.release() is False, "the job goes on"
    assert ensure_cluster(home).release(besides=["of a run that was cancelled"]) is False
    again = ensure_cluster(home)
    assert not again.started
    started = time.monotonic()
    assert again.release(besides=["left"]) is True
    assert time.monotonic() - started < 60
    _, left = psutil.wait_procs(family, timeout=60)
    # One that nobody has waited for yet is none.
    assert [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if p.status() != psutil.STATUS_ZOMBIE and temp_dir in " ".join(p.info["cmdline"] or [])
    ] == []
    assert servers.load(home, "ray") is None
    assert cluster.release() is False


@pytest.mark.slow
@pytest.mark.exclusive
def test_zz_two_starters_make_one_head_and_an_heir_replaces_it(tmp_path: Path) -> None:
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
        assert RayJobs(heir).submit("orphan", _request(code))
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
