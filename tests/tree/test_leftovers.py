"""`leftovers`, on a run of its own of tests that leave things behind, and of tests that do not."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from leftovers import Leftovers

def pytest_configure(config):
    config.pluginmanager.register(Leftovers(deadline_s={}))
"""
COMMON = """
import os, socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen
import pytest
from infra import env

def sleep_30():
    time.sleep(30)

def sleeper(**options):
    return subprocess.Popen(["sleep", "30"], **options)
"""
LIBRARY = """
import subprocess, sys, threading, time

def begin():
    threading.Thread(target=time.sleep, args=(30,), name="monitor", daemon=True).start()
    code = "import time; time.sleep(20)"
    subprocess.Popen([sys.executable, "-c", code, "torch/_inductor/compile_worker/__main__.py"])
"""
"""A thread and a process that a library keeps, as tqdm and torch do where they compile."""
LEAVING = """
def test_thread():
    threading.Thread(target=sleep_30, name="left", daemon=True).start()

def test_pool():
    ThreadPoolExecutor(1, thread_name_prefix="pool").submit(time.sleep, 2)

def test_child():
    sleeper()

def test_child_without_our_environment():
    sleeper(env={"PATH": os.environ["PATH"]})

def test_forked():
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)

def test_detached():
    code = "import subprocess; subprocess.Popen(['sleep', '30'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_socket():
    global listening
    listening = socket.create_server(("127.0.0.1", 0))

def test_variable_set():
    os.environ["RLHF_LEFT"] = "1"

def test_variable_removed():
    del os.environ["RLHF_GIVEN"]

def test_nothing():
    pass

def test_that_fails():
    os.environ["RLHF_LEFT_TOO"] = "1"
    raise ValueError("its own")

@pytest.fixture(scope="module")
def of_module():
    sleeper()

def test_first(of_module):
    pass

def test_last(of_module):
    pass
"""
CLEAN = """
@pytest.fixture(scope="session", autouse=True)
def of_session():
    child = sleeper()
    yield
    child.kill()
    child.wait()

@pytest.fixture(scope="module")
def server():
    before = os.environ.get("RLHF_GIVEN")
    os.environ["RLHF_GIVEN"] = "changed"
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as serving:
        serving.daemon_threads = False
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving.server_address
        serving.shutdown()
        thread.join()
    os.environ["RLHF_GIVEN"] = before

@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    yield home
    os.kill(int((home / "pid").read_text()), 9)

def test_server_of_a_module(home):
    child = subprocess.Popen(["sleep", "30"], env={**os.environ, "RLHF_HOME": str(home)})
    (home / "pid").write_text(str(child.pid))

@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool

def test_pool_of_a_module(pool):
    pool.submit(int).result()

def test_client(server):
    with socket.create_connection(server):
        time.sleep(0.1)

def test_thread(server):
    threading.Thread(target=time.sleep, args=(0.2,)).start()

def test_child():
    child = sleeper(start_new_session=True)
    child.kill()

def test_socket():
    with socket.create_server(("127.0.0.1", 0)):
        pass

def test_variables(monkeypatch):
    monkeypatch.setenv("RLHF_LEFT", "1")
    monkeypatch.delenv("RLHF_GIVEN")

def test_product():
    env.set_for_process("RAY_AUTH_MODE", "token")

def test_library():
    import library
    library.begin()

def test_last_of_the_module(server):
    pass
"""


def run(tests: str, tmp_path: Path, deadline_s: float) -> tuple[int, str]:
    """Exit code and report of pytest."""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(deadline_s), encoding="utf-8")
    (tmp_path / "test_planted.py").write_text(COMMON + tests, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {Path(__file__).parent} {tmp_path / 'installed'}\n",
        encoding="utf-8",
    )
    (tmp_path / "installed" / "library-1.dist-info").mkdir(parents=True)
    (tmp_path / "installed" / "library.py").write_text(LIBRARY, encoding="utf-8")
    metadata = tmp_path / "installed" / "library-1.dist-info" / "METADATA"
    metadata.write_text("Name: library\nVersion: 1\n", encoding="utf-8")
    report = tmp_path / "report"  # a pipe would be open as long as what is left
    with report.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", str(tmp_path)],
            env={**os.environ, "RLHF_GIVEN": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
    return done.returncode, report.read_text(encoding="utf-8")


def test_each_thing_that_is_left_is_an_error_that_names_it(tmp_path: Path) -> None:
    code, report = run(LEAVING, tmp_path, 0.2)
    for pid in re.findall(r"leaves process (\d+) ", report):
        os.kill(int(pid), signal.SIGKILL)
    assert code == 1
    left = dict(re.findall(r"test_planted.py(\S*) leaves (.*)", report))
    file = re.escape(str(tmp_path / "test_planted.py"))
    since = rf"since \d\d:\d\d:\d\d, from {file}:\d+"
    sleep = rf"process \d+ `sleep 30`, {since}"
    expected = {
        "::test_thread": rf"thread left of sleep_30, {since}",
        "::test_pool": rf"thread pool_0 of _worker, {since}",
        "::test_child": sleep,
        "::test_child_without_our_environment": sleep,
        "::test_forked": r"process \d+ `.*pytest.*`, since \d\d:\d\d:\d\d, from process \d+",
        "::test_detached": r"process \d+ `sleep 30`, since \d\d:\d\d:\d\d, from process \d+",
        "::test_socket": rf"socket \('127.0.0.1', \d+\), {since}",
        "::test_variable_set": rf"variable RLHF_LEFT, set from {file}:\d+",
        "::test_variable_removed": rf"variable RLHF_GIVEN, removed from {file}:\d+",
        "::test_that_fails": rf"variable RLHF_LEFT_TOO, set from {file}:\d+",
        "": sleep,
    }
    assert left.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.fullmatch(pattern, left[name])
    assert "1 failed, 12 passed, 11 errors" in report
    assert "ERROR at teardown of test_last" in report
    assert "ValueError: its own" in report


def test_what_is_ended_is_no_error(tmp_path: Path) -> None:
    code, report = run(CLEAN, tmp_path, 20)
    assert code == 0, report
    assert "10 passed" in report
