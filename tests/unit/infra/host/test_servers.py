"""Servers of a home, with real processes: killed starters, killed users, a full disk."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra import env
from infra.errors import ConfigError, ServiceError
from infra.host import servers
from infra.host.ports import pick_ports
from infra.host.records import make_place
from infra.host.servers import ServerCommand
from infra.services.stack import down, status_of
from infra.waiting import wait_for

NAME = "web"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    servers.end(tmp_path, NAME)


def _command(home: Path) -> ServerCommand:
    """A web server under guard: what stands for Ray and Prefect here."""
    port = pick_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    argv = (
        *(sys.executable, "-m", "infra.host.guard", str(home), NAME),
        *("http.server", str(port), "--bind", "127.0.0.1", "--directory", str(home)),
    )
    environment = env.child_environment()
    return ServerCommand(
        name=NAME, argv=argv, environment=environment, url=url, health_url=f"{url}/"
    )


def _processes(home: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and NAME in (process.info["cmdline"] or [])
        and str(home) in process.info["cmdline"]
    ]


def _start_elsewhere(
    home: Path, then: str, *, persistent: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """Start the server in a process of its own, which then does something."""
    code = f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_servers import _command
        from infra.host import servers
        home = Path({str(home)!r})
        with servers.lock(home, {NAME!r}):
            record = servers.start(home, _command(home), persistent={persistent})
        servers.wait_until_ready(record)
        print("ready", flush=True)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code) + textwrap.dedent(then)],
        stdout=subprocess.PIPE,
        text=True,
        env=env.child_environment(**variables),
    )


@pytest.mark.parametrize("point", ["before_start", "before_record", "recorded"])
def test_a_starter_killed_at_any_moment_leaves_what_down_ends(home: Path, point: str) -> None:
    # Persistent: its guard would soon end one whose only user died.
    starter = _start_elsewhere(home, "", persistent=True, RLHF_FAULTS=f"server.{point}=kill")
    with starter:
        assert starter.wait(timeout=60) == -9
    expected = {"before_start": 0, "before_record": 1, "recorded": 1}
    wait_for(lambda: len(_processes(home)) == expected[point], "what the starter left", 60.0)
    state = status_of(home, NAME).state
    assert state in ({"up", "silent"} if point == "recorded" else {"starting"})
    ended, kept = down(home)
    assert (ended, kept) == ([NAME], [])
    assert _processes(home) == []
    assert status_of(home, NAME).state == "down"


@pytest.mark.parametrize("point", ["", "before_record"])
def test_a_server_ends_by_itself_when_its_users_were_killed(home: Path, point: str) -> None:
    faults = {"RLHF_FAULTS": f"server.{point}=kill"} if point else {}
    with _start_elsewhere(home, "time.sleep(600)", **faults) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == ("" if point else "ready\n")
        if not point:  # a starter that killed itself may have been noticed already
            assert _processes(home)
        starter.kill()
    wait_for(lambda: not _processes(home), "the guard to end its server", 60.0)
    wait_for(lambda: servers.load(home, NAME) is None, "its record to go", 60.0)


def test_two_users_share_a_server_and_the_last_one_ends_it(home: Path) -> None:
    then = (
        "while len(servers.load(home, record.name).living_users) < 2: time.sleep(0.05)\n"
        "print(servers.leave(home, record.name))"
    )
    with _start_elsewhere(home, then) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "ready\n"
        with servers.lock(home, NAME):
            record = servers.load(home, NAME)
            assert record is not None
            servers.join(home, record, persistent=False)
        assert starter.communicate(timeout=60)[0] == "False\n"
    assert servers.running(home, NAME) is not None
    assert down(home)[1][0].users == (os.getpid(),), "down spares what a living run uses"
    assert servers.leave(home, NAME, is_busy=lambda: True) is False
    assert servers.running(home, NAME) is not None
    assert servers.leave(home, NAME) is True
    assert _processes(home) == []


def test_command_interrupted_in_server_stop_leaves_no_record(
    home: Path,
) -> None:
    leaving = """
    from infra.host.signals import OrderlyEnd

    def slow_stop_all(*arguments, **named):
        stop_all(*arguments, **named)
        print("all dead", flush=True)  # nobody is left who would forget them
        while not (home / "signalled").exists():
            time.sleep(0.01)

    stop_all, servers.stop_all = servers.stop_all, slow_stop_all
    with OrderlyEnd():
        servers.leave(home, record.name)
    """
    process = _start_elsewhere(home, leaving)
    assert process.stdout is not None
    with process.stdout as out:
        assert "all dead\n" in iter(out.readline, "")
        process.send_signal(signal.SIGINT)
        (home / "signalled").touch()
        assert process.wait(timeout=60) != 0
    assert servers.recorded(home) == []


def test_a_full_disk_holds_no_server_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        with servers.lock(disk, NAME):
            record = servers.start(disk, _command(disk), persistent=False)
        servers.wait_until_ready(record)
        with pytest.raises(OSError, match="No space left"):
            (disk / "ballast").write_bytes(b"0" * 4_000_000)
        with pytest.raises(OSError, match="No space left") as full, servers.lock(disk, NAME):
            servers.start(disk, _command(disk), persistent=True)
        assert str(disk) in full.value.filename
        assert servers.leave(disk, NAME) is True
        assert _processes(disk) == []
        assert servers.load(disk, NAME) is None
    finally:
        servers.end(disk, NAME)
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_server_that_ends_is_named_with_its_log(home: Path) -> None:
    argv = (sys.executable, "-c", "print('no way'); import time; time.sleep(1)")
    broken = _command(home).model_copy(update={"argv": argv})
    with servers.lock(home, NAME):
        record = servers.start(home, broken, persistent=False)
    with pytest.raises(ServiceError, match=rf"{NAME} ended; {home}/logs/{NAME}.log:\n +no way"):
        servers.wait_until_ready(record, deadline_s=300.0)
    asked: list[bool] = []
    with pytest.raises(ServiceError, match="given up"):
        servers.wait_until_ready(record, given_up=lambda: asked.append(True) or True)
    assert asked == [True]


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="^home: got .*cannot be made or written to") as told:
            make_place(place, "home", "set RLHF_HOME")
        assert "\n" not in str(told.value)
    make_place(tmp_path / "a" / "b", "home", "set RLHF_HOME")
    assert (tmp_path / "a" / "b").is_dir()
