import ast
import errno
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import env, faults
from infra.errors import ConfigError
from infra.faults import POINTS, InjectedFaultError, fault

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")
POINT = "atomic.before_rename"


@pytest.fixture(autouse=True)
def fresh_counts() -> Iterator[None]:
    faults._passes.clear()
    yield
    faults._passes.clear()


def points_in_source() -> Counter[object]:
    found: Counter[object] = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and "fault" in (
                    getattr(node.func, "id", ""),
                    getattr(node.func, "attr", ""),
                ):
                    found[getattr(node.args[0], "value", ast.dump(node.args[0]))] += 1
    return found


def test_the_list_of_points_is_the_source() -> None:
    assert set(points_in_source()) == set(POINTS)


def test_unarmed_points_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_FAULTS", raising=False)
    assert fault(POINT) is False
    monkeypatch.setenv("RLHF_FAULTS", "journal.before_write=raise")
    assert fault(POINT) is False


def test_a_point_fails_once_at_the_pass_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_FAULTS", f"journal.before_write=raise, {POINT}=raise@3")
    fault(POINT)
    fault(POINT)
    with pytest.raises(InjectedFaultError, match=POINT):
        fault(POINT)
    fault(POINT)


def test_another_setting_counts_from_its_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (f"{POINT}=nan@2", f"{POINT}=nan@2,journal.before_write=raise"):
        monkeypatch.setenv("RLHF_FAULTS", setting)
        assert [fault(POINT) for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize(("action", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_disk_errors(monkeypatch: pytest.MonkeyPatch, action: str, number: int) -> None:
    monkeypatch.setenv("RLHF_FAULTS", f"{POINT}={action}")
    with pytest.raises(OSError, match="injected") as caught:
        fault(POINT)
    assert caught.value.errno == number


def test_nan_asks_the_caller_and_sleep_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_FAULTS", f"{POINT}=nan")
    assert fault(POINT) is True
    assert fault(POINT) is False
    faults._passes.clear()
    monkeypatch.setenv("RLHF_FAULTS", f"{POINT}=sleep:0.05")
    start = time.monotonic()
    assert fault(POINT) is False
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize(
    "setting", ["no.such=kill", f"{POINT}=explode", f"{POINT}", f"{POINT}=kill@x"]
)
def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("RLHF_FAULTS", setting)
    with pytest.raises(ConfigError, match=r"^environment\.RLHF_FAULTS: "):
        fault(POINT)


@pytest.mark.parametrize(
    ("action", "returncode"), [("kill", -signal.SIGKILL), ("exit:7", 7), ("exit", 1)]
)
def test_actions_that_end_the_process(action: str, returncode: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from infra.faults import fault; fault({POINT!r}); print('on')"],
        env=env.child_environment(RLHF_FAULTS=f"{POINT}={action}", PYTHONPATH=str(ROOT)),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (returncode, b"")
