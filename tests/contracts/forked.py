"""Python processes that begin with the libraries loaded: a fork of a process that loaded them once.

To load torch, transformers and the engines takes seconds of a core; what tests start as ranks is
tens of processes. Promises: a process has the environment, the paths and the arguments that it is
given, and what it prints goes to a file; it ends by the exit code or the signal that a program of
its own would. Its parent has no thread and has computed nothing, so that a fork of it is sound.
Does not promise a module that is read at its import from the environment: it was read before.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

KILL_DEADLINE_S = 60.0
"""Until a process that was killed is gone."""
_PRELOADED = "rlhf.testing.preloaded"


class Forked:
    """Such a process, with what tests use of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, -N by signal N; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit code, -N by signal N; raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End it, if it lives."""
        self._process.kill()
        self._process.join(KILL_DEADLINE_S)


def start_python(
    arguments: Sequence[str], output: Path, environment: Mapping[str, str] | None = None
) -> Forked:
    """Start what `python ARGUMENTS...` would run.

    Args:
        arguments: a file, or `-m` and a module, and arguments of it.
        output: what it prints, errors too.
        environment: its whole environment; None: that of this process.

    Returns:
        The process; the caller waits for it.
    """
    given = {**(os.environ if environment is None else environment)}
    process = _context().Process(
        target=_run, args=(list(arguments), str(output), given), daemon=True
    )
    process.start()
    return Forked(process)


def start_python_anew(arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """As `start_python`, without a fork: for what libraries ask the environment when they load."""
    with output.open("wb") as file:
        return subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def _run(arguments: list[str], output: str, environment: dict[str, str]) -> None:
    """In the process: become the program."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
