"""Calls to SGLang's server over HTTP.

Promises: every call belongs to the event loop that it is made in; an answer is JSON or an error
that says what SGLang said; a server that died is a `ReplicaLostError` with the end of its log.
Does not promise deadlines: whoever calls has one.
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
"""A process that dies closes its connections before it is gone."""
EVENT, END = b"data: ", b"[DONE]"


class Client:
    """See the module.

    Args:
        server: that is called.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, path: str, body: Mapping[str, Any], accepted: Collection[int] = (200,)
    ) -> Any:
        """Call and wait for the answer.

        Args:
            path: of the server.
            body: for JSON.
            accepted: states of an answer that is no refusal.

        Returns:
            From JSON; None for an answer without.

        Raises:
            RolloutError: SGLang refuses, or the connection broke.
            ReplicaLostError: SGLang died.
        """
        return await self._exchange("POST", path, body, accepted)

    async def get(self, path: str) -> Any:
        """As `post`, without a body."""
        return await self._exchange("GET", path, None, (200,))

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Call for several answers.

        Args:
            path: of the server.
            body: for JSON.

        Yields:
            Any: each answer, from JSON, as it comes.

        Raises:
            RolloutError: see `post`.
        """
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
        """Made by the first call: it belongs to the loop that runs then."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self._server.url,
                headers={"Authorization": f"Bearer {self._server.key}"},
                # One for each call: the server closes idle ones as they are used again.
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
    """Server-sent events, however they are cut into chunks."""
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
