"""What ends a command, in real processes."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import builtins, contextlib, sys, time
from pydantic import BaseModel, model_serializer
from infra.host.signals import OrderlyEnd

class SlowToEnd:
    def __del__(self):
        print("finalizing", flush=True)
        time.sleep(0.5)

class SlowToSerialize(BaseModel):
    @model_serializer
    def serialize(self) -> str:
        print("serializing", flush=True)
        time.sleep(10)
        return ""

builtins.kept = SlowToEnd()
try:
    with OrderlyEnd():
        %s
        print("up", flush=True)
        time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""
SWALLOWED = """
        with contextlib.suppress(Exception):
            SlowToSerialize().model_dump()
"""
SLOW_TO_END = """
        try:
            print("up", flush=True)
            time.sleep(30)
        finally:
            with contextlib.suppress(KeyError):
                {}["a nested exception"]
            time.sleep(1)
            print("ended well", flush=True)
"""
ENDS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


def _start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@ENDS
@pytest.mark.parametrize(
    ("body", "line"),
    [
        pytest.param("SlowToEnd()", "finalizing\n", id="python-ignores-it"),
        pytest.param(SWALLOWED, "serializing\n", id="pydantic-replaces-it-and-someone-swallows"),
        pytest.param("SlowToSerialize().model_dump()", "serializing\n", id="pydantic-replaces-it"),
    ],
)
def test_a_signal_whose_exception_gets_lost_ends_the_command_all_the_same(
    number: signal.Signals, code: int, body: str, line: str
) -> None:
    process = _start(PROGRAM % body)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == line
        process.send_signal(number)
        assert process.wait(timeout=5) == code


@ENDS
def test_a_slow_end_is_not_interrupted(number: signal.Signals, code: int) -> None:
    process = _start(PROGRAM % SLOW_TO_END)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "up\n"
        process.send_signal(number)
        time.sleep(0.3)
        process.send_signal(number)
        assert out.readline() == "ended well\n"
        assert process.wait(timeout=10) == code


HELD_BACK = """
        from infra.host.signals import uninterrupted
        with uninterrupted():
            print("up", flush=True)
            time.sleep(0.5)
            print("done whole", flush=True)
        print("not reached", flush=True)
"""


@ENDS
@pytest.mark.parametrize("num_signals", [1, 2])
def test_what_is_not_to_be_interrupted_is_done_whole_and_then_the_command_ends(
    number: signal.Signals, code: int, num_signals: int
) -> None:
    process = _start(PROGRAM % HELD_BACK)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "up\n"
        for _ in range(num_signals):
            process.send_signal(number)
            time.sleep(0.1)
        assert out.readline() == "done whole\n"
        assert process.wait(timeout=10) == code
        assert out.read() == "finalizing\n"


IMPORTING = """
import sys, threading, time
from infra.host.signals import OrderlyEnd

# The part of the import system that runs with its lock held, made long.
part = '''
print("importing", flush=True)
while not stop:
    time.sleep(0.01)
print("imported", flush=True)
'''
stop = []
threading.Timer(0.5, stop.append, [1]).start()
with OrderlyEnd():
    exec(compile(part, "<frozen importlib._bootstrap>", "exec"))
    time.sleep(30)
"""


def test_a_signal_in_the_middle_of_an_import_waits_for_it() -> None:
    process = _start(IMPORTING)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        assert out.readline() == "imported\n"
        assert process.wait(timeout=10) == 143


@ENDS
def test_a_signal_that_comes_while_python_ends_does_not_change_the_exit_code(
    number: signal.Signals, code: int
) -> None:
    process = _start(PROGRAM % "pass")
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "up\n"
        process.send_signal(number)
        assert out.readline() == "finalizing\n"
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=10) == code
