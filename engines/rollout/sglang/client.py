"""Calls SGLang's server over HTTP; deadlines are the caller's task.

Promises: answers are parsed JSON, or an error with SGLang's message; the death of the server is a
`ReplicaLostError` with the end of its log.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp

from engines.errors import ReplicaLostError, RolloutError
from engines.rollout.sglang.server import Server

DYING_S = 5.0
"""A dying process closes its connections before it is gone."""
EVENT, END = b"data: ", b"[DONE]"


class Client:
    """HTTP client of one server, used in one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, path: str, body: Mapping[str, Any], accepted: Collection[int] = (200,)
    ) -> Any:
        """Call and return the parsed JSON answer, or None; `accepted` holds allowed HTTP statuses.

        Raises:
            RolloutError: SGLang refuses, or the connection broke.
            ReplicaLostError: SGLang died.
        """
        return await self._exchange("POST", path, body, accepted)

    async def get(self, path: str) -> Any:
        """Call without a body; see `post`."""
        return await self._exchange("GET", path, None, (200,))

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Call and yield each parsed answer as it comes; errors as in `post`."""
        try:
            async with self._connection().post(path, json=body) as response:
                if response.status != 200:
                    content = await response.read()
                    raise RolloutError(_refusal(path, response.status, content))
                async with aclosing(_events(response.content.iter_any())) as events:
                    async for event in events:
                        yield event
        except aiohttp.ClientError as error:
            raise await self._failure(error) from error

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, accepted: Collection[int]
    ) -> Any:
        try:
            async with self._connection().request(method, path, json=body) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise await self._failure(error) from error
        if response.status not in accepted:
            raise RolloutError(_refusal(path, response.status, content))
        return json.loads(content) if content.startswith((b"{", b"[")) else None

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
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        *whole, rest = held.split(b"\n\n")
        held = bytearray(rest)
        for event in whole:
            content = bytes(event).removeprefix(EVENT)
            if content == END:
                return
            answer = json.loads(content)
            if "error" in answer:
                raise RolloutError(f"SGLang refuses: {answer['error']}")
            yield answer


def _refusal(path: str, status: int, content: bytes) -> str:
    return f"SGLang refuses {path}: {status}, {content.decode(errors='replace')}"
