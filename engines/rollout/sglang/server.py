"""SGLang's server as a child process.

Promises: it listens only on loopback and requires a key that only its environment holds. It leads
its own session, carries the process mark by which the reaper finds it, and ends when this process
ends (`server_main`). Nothing of it stays on disk or in memory.
Does not promise a quick start: it imports SGLang three times, 70 s of CPU time.
"""

import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.errors import RolloutError
from engines.rollout.sglang.server_main import ARGUMENTS, REFUSAL, remove, shared_memory_of
from infra import env
from infra.errors import ConfigError, DeadlineError
from infra.host.loopback_http import answers_ok
from infra.host.ports import pick_ports
from infra.host.processes import is_alive, start_detached, stop_all
from infra.host.records import log_tail

START_DEADLINE_S = 540.0
"""Shorter than the start deadline of its replica."""
STOP_DEADLINE_S = 10.0
POLL_S = 0.2
HOST = "127.0.0.1"
_LEAKS = r"nanobind|^ - (leaked |\.\.\. skipped)"


class Server:
    """A running server; made by `start`. A None in `environment` removes the variable."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str | None]) -> None:
        self.key = secrets.token_urlsafe(32)
        [port] = pick_ports(1)
        self.url = f"http://{HOST}:{port}"
        self._directory = Path(tempfile.mkdtemp(prefix="rlhf-sglang-"))
        self._log_path = self._directory / "server.log"
        text = json.dumps({**arguments, "host": HOST, "port": port})
        (self._directory / ARGUMENTS).write_text(text, encoding="utf-8")
        whole = {
            **environment,
            env.RLHF_SGLANG_KEY.name: self.key,
            "TMPDIR": str(self._directory),  # SGLang does not remove its socket files
        }
        main = "engines.rollout.sglang.server_main"
        process = start_detached(
            [sys.executable, "-P", "-m", main, str(self._directory)],
            self._log_path,
            env.child_environment(**whole),
            mark=env.RLHF_PROCESS_MARK.get(),
        )
        # A fresh mark, so that `stop` goes by the session: other processes share the mark.
        self._process = process.model_copy(update={"mark": secrets.token_hex(16)})
        self._shared_memory: set[Path] = set()

    @property
    def is_lost(self) -> bool:
        """True if its first process, and so all of them, is gone."""
        return not is_alive(self._process)

    @property
    def log_tail(self) -> str:
        """The last lines of its log, without the noise that a library appends to every error."""
        return log_tail(self._log_path, noise=_LEAKS)

    def await_ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            ConfigError: SGLang refuses its arguments.
            RolloutError: the server ended.
            DeadlineError: the start took too long.
        """
        end = time.monotonic() + START_DEADLINE_S
        while not answers_ok(f"{self.url}/health"):
            if self.is_lost:
                refusal = self._directory / REFUSAL
                if refusal.is_file():
                    reason = refusal.read_text(encoding="utf-8")
                    raise ConfigError("rollout.options", f"SGLang refuses: {reason}")
                raise RolloutError(f"SGLang ended while it started{self.log_tail}")
            if time.monotonic() > end:
                raise DeadlineError(f"SGLang to start{self.log_tail}", START_DEADLINE_S)
            time.sleep(POLL_S)
        self._shared_memory = shared_memory_of(self._process.pid)

    def stop(self) -> None:
        """End it and remove its files; may be repeated."""
        try:
            stop_all([self._process], STOP_DEADLINE_S)
        finally:
            remove(self._shared_memory)
            shutil.rmtree(self._directory, ignore_errors=True)


def start(arguments: Mapping[str, Any], environment: Mapping[str, str | None]) -> Server:
    """Start a server and wait until it takes requests, or stop it and raise a PipelineError."""
    server = Server(arguments, environment)
    try:
        server.await_ready()
    except BaseException:
        server.stop()
        raise
    return server
