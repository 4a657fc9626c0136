"""Sends samples that start together to SGLang in one call and returns each when it is finished.

Samples of one `generate` call that are put in during one iteration of the event loop form one call
of the server, in their order. If SGLang refuses one sample, the others of its call fail too.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Any

from engines.errors import RolloutError
from engines.rollout.served.in_flight import RunningSample
from engines.rollout.sglang.client import Client
from engines.rollout.sglang.translation import batch_body

GENERATE = "/generate"

Answer = asyncio.Future[Any]


class BatchedCalls:
    """Groups samples into calls of the server; reports the name of each sent sample to `sent`.

    Samples wait while `may_send` is clear.
    """

    def __init__(
        self,
        client: Client,
        eos_token_ids: Collection[int],
        may_send: asyncio.Event,
        sent: Callable[[str], None],
    ) -> None:
        self._client, self._eos_token_ids = client, eos_token_ids
        self._may_send, self._sent = may_send, sent
        self._waiting: dict[int, list[tuple[RunningSample, Answer]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, sample: RunningSample) -> Answer:
        """Return a future of SGLang's last answer about a sample; if cancelled, it is not sent."""
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        if sample.call not in self._waiting:
            self._waiting[sample.call] = []
            task = loop.create_task(self._send(sample.call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._waiting[sample.call].append((sample, answer))
        return answer

    async def close(self) -> None:
        """Cancel all calls; SGLang drops their samples."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _send(self, call: int) -> None:
        await self._may_send.wait()
        rows = [row for row in self._waiting.pop(call) if not row[1].done()]
        if not rows:
            return
        left = {sample.name: answer for sample, answer in rows}
        for name in left:
            self._sent(name)
        error = RolloutError(f"SGLang said nothing of the end of {len(left)} samples or more")
        try:
            await self._read(batch_body([sample for sample, _ in rows], self._eos_token_ids), left)
        except RolloutError as found:
            error = found
        finally:
            for answer in left.values():
                if not answer.done():
                    answer.set_exception(error)

    async def _read(self, body: dict[str, Any], left: dict[str, Answer]) -> None:
        async with aclosing(self._client.stream(GENERATE, body)) as answers:
            async for found in answers:
                meta = found["meta_info"]
                if meta["finish_reason"] is None:
                    continue
                answer = left.pop(meta["id"])
                if not answer.done():  # the sample may be cancelled
                    answer.set_result(found)
