"""SGLang's server as a child process, and its HTTP client.

Promises: the server listens only on loopback and requires a key, passed in its environment alone.
It leads its own session, carries the process mark by which the reaper finds it, and ends when this
process ends (`server_main`). `stop` removes its files and shared memory. Answers are parsed JSON or
an error with SGLang's message; the death of a started server is a `ReplicaLostError` with the end
of its log.
Does not promise a quick start (it imports SGLang three times, 70 s of CPU time), or deadlines of
calls: these are the caller's task.
"""

import asyncio
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp

from engines.errors import ReplicaLostError, RolloutError
from engines.rollout.sglang.server_main import ARGUMENTS, REFUSAL, remove, shared_memory_of
from infra import env
from infra.errors import ConfigError, DeadlineError, on_failure
from infra.host.ports import answers_ok, pick_ports
from infra.host.processes import is_alive, start_detached, stop_all
from infra.host.records import log_tail

START_DEADLINE_S = 540.0
"""Shorter than the start deadline of its replica."""
STOP_DEADLINE_S = 10.0
POLL_S = 0.2
HOST = "127.0.0.1"
SERVER_MAIN = "engines.rollout.sglang.server_main"
_LEAKS = r"nanobind|^ - (leaked |\.\.\. skipped)"
DYING_S = 5.0
"""Wait after a broken connection: a dying process closes connections before it is gone."""
EVENT, END = b"data: ", b"[DONE]"


class Server:
    """A running server; made by `start`. A None in `environment` removes the variable."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str | None]) -> None:
        self.key = secrets.token_urlsafe(32)
        [port] = pick_ports(1)
        self.url = f"http://{HOST}:{port}"
        self._directory = Path(tempfile.mkdtemp(prefix="rlhf-sglang-"))
        self._log_path = self._directory / "server.log"
        (self._directory / ARGUMENTS).write_text(
            json.dumps({**arguments, "host": HOST, "port": port}), encoding="utf-8"
        )
        whole = {
            **environment,
            env.RLHF_SGLANG_KEY.name: self.key,
            "TMPDIR": str(self._directory),  # SGLang does not remove its socket files
        }
        # The record has a mark that no process has: `stop` would end every process with our mark.
        self._process = start_detached(
            [sys.executable, "-P", "-m", SERVER_MAIN, str(self._directory)],
            self._log_path,
            env.child_environment(**whole),
            mark=env.RLHF_PROCESS_MARK.get(),
        ).model_copy(update={"mark": secrets.token_hex(16)})
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
        """Wait until the server takes requests.

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
                    raise ConfigError(
                        "rollout.options", f"SGLang refuses: {refusal.read_text(encoding='utf-8')}"
                    )
                raise RolloutError(f"SGLang ended while it started{self.log_tail}")
            if time.monotonic() > end:
                raise DeadlineError(f"SGLang to start{self.log_tail}", START_DEADLINE_S)
            time.sleep(POLL_S)
        self._shared_memory = shared_memory_of(self._process.pid)

    def stop(self) -> None:
        """End the server and remove its files; may be repeated."""
        try:
            stop_all([self._process], STOP_DEADLINE_S)
        finally:
            remove(self._shared_memory)
            shutil.rmtree(self._directory, ignore_errors=True)


def start(arguments: Mapping[str, Any], environment: Mapping[str, str | None]) -> Server:
    """Start a server and wait until it takes requests, or stop it and raise a PipelineError."""
    server = Server(arguments, environment)
    with on_failure(lambda _: server.stop()):
        server.await_ready()
    return server


class Client:
    """HTTP client of one server, used in one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, path: str, body: Mapping[str, Any] | None = None, accepted: Collection[int] = (200,)
    ) -> Any:
        """Post a body, or get without one; return the parsed JSON answer or None.

        `accepted` holds allowed HTTP statuses.

        Raises:
            RolloutError: SGLang refuses, or the connection broke.
            ReplicaLostError: SGLang died.
        """
        method = "GET" if body is None else "POST"
        try:
            async with self._connection().request(method, path, json=body) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise await self._failure(error) from error
        if response.status not in accepted:
            raise RolloutError(_refusal(path, response.status, content))
        return json.loads(content) if content.startswith((b"{", b"[")) else None

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Call and yield each parsed answer as it comes; errors as in `call`."""
        try:
            async with self._connection().post(path, json=body) as response:
                if response.status != 200:
                    raise RolloutError(_refusal(path, response.status, await response.read()))
                async with aclosing(_events(response.content.iter_any())) as events:
                    async for event in events:
                        yield event
        except aiohttp.ClientError as error:
            raise await self._failure(error) from error

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    def _connection(self) -> aiohttp.ClientSession:
        """Create the session at the first call: it belongs to the loop that runs then."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self._server.url,
                headers={"Authorization": f"Bearer {self._server.key}"},
                # One connection per call: the server may close an idle one just as it is reused.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    async def _failure(self, error: Exception) -> RolloutError:
        for _ in range(int(DYING_S / 0.1)):
            if self._server.is_lost:
                return ReplicaLostError(f"SGLang died{self._server.log_tail}")
            await asyncio.sleep(0.1)
        return RolloutError(f"SGLang's server: {error or type(error).__name__}")


async def _events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    held = b""
    async for chunk in chunks:
        *whole, held = (held + chunk).split(b"\n\n")
        for event in whole:
            content = event.removeprefix(EVENT)
            if content == END:
                return
            answer = json.loads(content)
            if "error" in answer:
                raise RolloutError(f"SGLang refuses: {answer['error']}")
            yield answer


def _refusal(path: str, status: int, content: bytes) -> str:
    return f"SGLang refuses {path}: {status}, {content.decode(errors='replace')}"
