"""What ends a command, in real processes."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import builtins, contextlib, os, sys, time
from pydantic import BaseModel, model_serializer
from infra.host.signals import OrderlyEnd

def go_on():  # once somebody says so; signals that come before are handled before
    os.read(0, 1)

class SlowToEnd:
    def __init__(self, wait):
        self.wait = wait
    def __del__(self):
        print("finalizing", flush=True)
        self.wait()

class SlowToSerialize(BaseModel):
    @model_serializer
    def serialize(self) -> str:
        print("serializing", flush=True)
        time.sleep(600)
        return ""

builtins.kept = SlowToEnd(go_on)
try:
    with OrderlyEnd():
        %s
        print("up", flush=True)
        time.sleep(600)
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
            time.sleep(600)
        finally:
            with contextlib.suppress(KeyError):
                {}["a nested exception"]
            print("ending", flush=True)
            go_on()
            print("ended well", flush=True)
"""
ENDS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


def _start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _let_go_on(process: subprocess.Popen[str], num_times: int = 1) -> None:
    """What waits goes on, after every signal that was sent before."""
    assert process.stdin is not None
    process.stdin.write("." * num_times)
    process.stdin.flush()


@ENDS
@pytest.mark.parametrize(
    ("body", "line"),
    [
        pytest.param("SlowToEnd(lambda: time.sleep(600))", "finalizing\n", id="python-ignores-it"),
        pytest.param(SWALLOWED, "serializing\n", id="pydantic-replaces-it-and-someone-swallows"),
        pytest.param("SlowToSerialize().model_dump()", "serializing\n", id="pydantic-replaces-it"),
    ],
)
def test_signal_ends_the_command_even_if_its_exception_is_lost(
    number: signal.Signals, code: int, body: str, line: str
) -> None:
    process = _start(PROGRAM % body)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert out.readline() == line
        process.send_signal(number)
        _let_go_on(process)
        assert process.wait(timeout=60) == code


@ENDS
def test_a_slow_end_is_not_interrupted(number: signal.Signals, code: int) -> None:
    process = _start(PROGRAM % SLOW_TO_END)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert out.readline() == "up\n"
        process.send_signal(number)
        assert out.readline() == "ending\n"
        process.send_signal(number)
        _let_go_on(process, 2)
        assert out.readline() == "ended well\n"
        assert process.wait(timeout=60) == code


HELD_BACK = """
        from infra.host.signals import uninterrupted
        with uninterrupted():
            print("up", flush=True)
            go_on()
            print("still here", flush=True)
            go_on()
            print("done whole", flush=True)
        print("not reached", flush=True)
"""


@ENDS
@pytest.mark.parametrize("num_signals", [1, 2])
def test_uninterruptible_section_completes_then_command_ends(
    number: signal.Signals, code: int, num_signals: int
) -> None:
    process = _start(PROGRAM % HELD_BACK)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert out.readline() == "up\n"
        process.send_signal(number)
        _let_go_on(process)
        assert out.readline() == "still here\n"
        if num_signals == 2:
            process.send_signal(number)
        _let_go_on(process, 2)
        assert out.readline() == "done whole\n"
        assert process.wait(timeout=60) == code
        assert out.read() == "finalizing\n"


IMPORTING = """
import os, sys, threading, time
from infra.host.signals import OrderlyEnd

# The part of the import system that runs with its lock held, made long.
part = '''
print("importing", flush=True)
while not stop:
    time.sleep(0.01)
print("imported", flush=True)
'''
stop = []
threading.Thread(target=lambda: stop.append(os.read(0, 1)), daemon=True).start()
with OrderlyEnd():
    exec(compile(part, "<frozen importlib._bootstrap>", "exec"))
    time.sleep(600)
"""


def test_a_signal_in_the_middle_of_an_import_waits_for_it() -> None:
    process = _start(IMPORTING)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert out.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        _let_go_on(process)
        assert out.readline() == "imported\n"
        assert process.wait(timeout=60) == 143


@ENDS
def test_signal_during_interpreter_exit_keeps_the_exit_code(
    number: signal.Signals, code: int
) -> None:
    process = _start(PROGRAM % "pass")
    assert process.stdout is not None
    with process, process.stdout as out:
        assert out.readline() == "up\n"
        process.send_signal(number)
        assert out.readline() == "finalizing\n"
        process.send_signal(number)
        process.send_signal(number)
        _let_go_on(process)
        assert process.wait(timeout=60) == code
