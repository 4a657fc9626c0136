"""What ends a command, in real processes."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import builtins, sys, time
from infra.host.signals import OrderlyEnd

class SlowToEnd:
    def __del__(self):
        print("finalizing", flush=True)
        time.sleep(0.5)

OrderlyEnd().install()
builtins.kept = SlowToEnd()
try:
    %s
    print("up", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""
ENDS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


@ENDS
def test_a_signal_whose_exception_python_ignores_ends_the_command_all_the_same(
    number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM % "SlowToEnd()"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "finalizing\n"
        process.send_signal(number)
        assert process.wait(timeout=10) == code


IMPORTING = """
import sys, threading, time
from infra.host.signals import OrderlyEnd

OrderlyEnd().install()
# The part of the import system that runs with its lock held, made long.
part = '''
print("importing", flush=True)
while not stop:
    time.sleep(0.01)
print("imported", flush=True)
'''
stop = []
threading.Timer(0.5, stop.append, [1]).start()
exec(compile(part, "<frozen importlib._bootstrap>", "exec"))
time.sleep(30)
"""


def test_a_signal_in_the_middle_of_an_import_waits_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", IMPORTING], stdout=subprocess.PIPE, text=True)
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
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM % "pass"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "up\n"
        process.send_signal(number)
        assert out.readline() == "finalizing\n"
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=10) == code
