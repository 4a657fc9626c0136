"""Detached children: identity, the whole family's end, locks, records and waits."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infra import env
from infra.errors import DeadlineError, ServiceError
from infra.host import processes
from infra.host.processes import (
    ProcessIdentity,
    ProcessRecord,
    identify,
    is_alive,
    num_bytes_read,
    own_identity,
    start_detached,
    stop_all,
)
from infra.host.records import file_lock, load_record, log_tail, save_record
from infra.store import process_stamp
from infra.waiting import wait_for

DEADLINE_S = 240.0
"""Until processes have to be gone; who ignores SIGTERM is killed after half of it."""


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[int]]]:
    """Signals that `stop_all` sends, by process; half of its deadline is over at the tenth look.

    After that the clock stands still: a killed process may take as long as it needs to end.
    """
    sent: list[tuple[int, set[int]]] = []
    signal_all, now_s = processes._signal, [0.0]

    def send(to: Collection[psutil.Process], number: int) -> None:
        sent.append((number, {process.pid for process in to}))
        signal_all(to, number)

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        now_s[0] = min(now_s[0] + DEADLINE_S / 20, 0.6 * DEADLINE_S)

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(processes, "_signal", send)
    monkeypatch.setattr(processes, "time", clock)
    return sent


def _start(tmp_path: Path, code: str, **variables: str) -> ProcessRecord:
    return start_detached(
        [sys.executable, "-c", textwrap.dedent(code)],
        tmp_path / "logs" / "child.log",
        env.child_environment(**variables),
        cwd=tmp_path,
    )


def _read_when_there(path: Path) -> str:
    return wait_for(lambda: path.exists() and path.read_text(), str(path), 60.0, poll_s=0.01)


def test_spawned_child_leads_session_and_is_known_beyond_pid(tmp_path: Path) -> None:
    record = _start(tmp_path, "import time; time.sleep(600)")
    try:
        assert is_alive(record)
        assert os.getsid(record.pid) == os.getpgid(record.pid) == record.pid != os.getsid(0)
        assert identify(record.pid) == ProcessIdentity(pid=record.pid, started=record.started)
        later = record.model_copy(update={"started": record.started + "1"})
        assert not is_alive(later), "another process with the same pid"
    finally:
        stop_all([record], DEADLINE_S)
    assert not is_alive(record)
    assert identify(record.pid) is None


def test_process_without_boot_id_is_known_by_creation_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stamp, "boot_id", lambda: "")
    monkeypatch.setattr(process_stamp, "_machine", process_stamp._machine.__wrapped__)
    record = _start(tmp_path, "import time; time.sleep(600)")
    created_s = psutil.Process(record.pid).create_time()
    try:
        assert record.started == f":{round(created_s * 100)}"
        assert is_alive(record)
        assert not is_alive(record.model_copy(update={"started": record.started + "1"}))
        assert is_alive(own_identity())
        assert not process_stamp.is_dead(process_stamp.own_stamp())
        assert process_stamp.living_pid(process_stamp.own_stamp()) == os.getpid()
    finally:
        stop_all([record], DEADLINE_S)
    assert identify(record.pid) is None


def test_spawned_child_gets_env_cwd_private_files_and_sigint(
    tmp_path: Path,
) -> None:
    # The parent ignores SIGINT, as every background job of a shell does.
    code = f"""
        import signal, time
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from infra import env
        from infra.host.processes import start_detached, identify
        import sys
        child = '''
        import os, signal, time
        print(os.environ["COLOUR"], os.getcwd(), signal.getsignal(signal.SIGINT), flush=True)
        open("made", "w").close()
        end = time.time() + 120
        while not os.path.exists("seen") and time.time() < end:
            time.sleep(0.01)
        '''
        import textwrap
        start_detached([sys.executable, "-c", textwrap.dedent(child)], Path("out.log"),
                       env.child_environment(COLOUR="green"), cwd=Path({str(tmp_path)!r}))
        end = time.time() + 120
        while not Path("made").exists() and time.time() < end:
            time.sleep(0.01)
        Path("seen").touch()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True, timeout=240
    )
    printed = (tmp_path / "out.log").read_text()
    assert printed.startswith(f"green {tmp_path} ")
    assert "default_int_handler" in printed
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0


def test_fault_row_20_stop_reaches_grandchildren_in_own_sessions(tmp_path: Path) -> None:
    record = _start(
        tmp_path,
        """
        import subprocess, sys, time
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        middle = (
            "import subprocess, sys;"
            f"p = subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True,"
            " stdout=subprocess.DEVNULL);"
            "print(p.pid)"
        )
        # The middle process ends at once, so the grandchild is an orphan in its own session.
        pid = subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE).stdout
        open("grandchild.tmp", "wb").write(pid)
        import os; os.rename("grandchild.tmp", "grandchild")
        time.sleep(600)
        """,
    )
    grandchild = psutil.Process(int(_read_when_there(tmp_path / "grandchild")))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        stop_all([record], DEADLINE_S)
        assert not is_alive(record)
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_finds_the_family_of_a_leader_that_was_killed(tmp_path: Path) -> None:
    record = _start(
        tmp_path,
        """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("pid.tmp", "w").write(str(child.pid))
        os.rename("pid.tmp", "pid")
        time.sleep(600)
        """,
    )
    child = psutil.Process(int(_read_when_there(tmp_path / "pid")))
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(record), "the leader's death", 60.0, poll_s=0.01)
    assert child.is_running()
    stop_all([record], DEADLINE_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    stop_all([record], DEADLINE_S)  # and again, with nobody left


def test_stop_lets_a_process_say_goodbye_first(tmp_path: Path) -> None:
    record = _start(
        tmp_path,
        """
        import signal, sys, time
        def bye(*_):
            open("farewell", "w").write("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, bye)
        open("ready", "w").write("1")
        time.sleep(600)
        """,
    )
    _read_when_there(tmp_path / "ready")
    stop_all([record], DEADLINE_S)
    assert (tmp_path / "farewell").read_text() == "saved"


def test_stop_all_shares_one_deadline(tmp_path: Path, signals: list[tuple[int, set[int]]]) -> None:
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready-{NAME}", "w").write("1")
        time.sleep(600)
    """
    records = [_start(tmp_path, code.replace("NAME", f"'{n}'")) for n in "ab"]
    for name in "ab":
        _read_when_there(tmp_path / f"ready-{name}")
    pids = {record.pid for record in records}
    stop_all(records, DEADLINE_S)
    rounds = [to for number, to in signals if number == signal.SIGKILL]
    assert rounds[0] == pids, "all of them at once"
    assert (signal.SIGTERM, pids) in signals
    assert not any(is_alive(record) for record in records)


def test_a_record_of_another_boot_matches_nobody(tmp_path: Path) -> None:
    record = _start(tmp_path, "import time; time.sleep(600)")
    stale = record.model_copy(update={"started": "other-boot:1", "mark": "nobody"})
    stop_all([stale], DEADLINE_S)
    assert is_alive(record)
    stop_all([record], DEADLINE_S)


def test_a_program_that_is_not_there_is_reported_by_its_log(tmp_path: Path) -> None:
    log_path = tmp_path / "child.log"
    with suppress(ServiceError):  # raised if it ended before it could be looked at
        record = start_detached(["/no/such/program"], log_path, env.child_environment())
        wait_for(lambda: not is_alive(record), "its end", 60.0, poll_s=0.01)
    assert "/no/such/program" in log_tail(log_path) or "No such file" in log_tail(log_path)


def test_own_identity_is_ours_and_alive() -> None:
    assert own_identity().pid == os.getpid()
    assert is_alive(own_identity())


def test_wait_for_says_what_it_waited_for() -> None:
    answers = iter([None, 0, "", "here"])
    assert wait_for(lambda: next(answers), "it", 5.0, poll_s=0.0) == "here"
    with pytest.raises(DeadlineError, match=r"0\.05 s waiting for the moon"):
        wait_for(lambda: False, "the moon", 0.05, poll_s=0.01)


def test_lock_excludes_a_second_holder_and_survives_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    holder = _start(
        tmp_path,
        f"""
        import time
        from pathlib import Path
        from infra.host.records import file_lock
        with file_lock(Path({str(path)!r}), 5.0):
            open("held", "w").write("1")
            time.sleep(600)
        """,
    )
    _read_when_there(tmp_path / "held")
    with pytest.raises(DeadlineError, match=r"a\.lock"), file_lock(path, 0.1):
        pytest.fail("two holders")
    os.kill(holder.pid, signal.SIGKILL)
    with file_lock(path, 60.0):
        pass
    stop_all([holder], DEADLINE_S)


def test_records_come_back_equal_and_private(tmp_path: Path) -> None:
    path = tmp_path / "services" / "x.json"
    assert load_record(path, ProcessRecord) is None
    record = ProcessRecord(
        pid=7, started="b:1", mark="m", argv=("a", "b c"), log_path=tmp_path / "log"
    )
    save_record(path, record)
    assert load_record(path, ProcessRecord) == record
    assert path.parent.stat().st_mode & 0o077 == 0
    path.write_text('{"pid": 7}')
    with pytest.raises(ServiceError, match=r"x\.json is not a ProcessRecord"):
        load_record(path, ProcessRecord)


def test_log_tail_reads_the_end_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_tail(path) == ""
    path.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert log_tail(path, 2) == "\n    line 9998\n    line 9999"
    assert log_tail(path, 2, noise="9$|98") == "\n    line 9996\n    line 9997"


def test_what_is_read_of_files_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2**20))
    before = num_bytes_read()
    (tmp_path / "file").read_bytes()
    assert num_bytes_read() >= before + 2**20
