"""Samples that start together go to SGLang in one call, and come out of it one by one.

Promises: what is put in before the loop comes round again, of one call of `generate`, is one call
of the server, in that order; each sample comes out when it is finished, whatever the others do.
Does not promise that one which SGLang refuses leaves the others of its call alone: they fail too.
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
    """See the module.

    Args:
        client: of the server.
        eos_token_ids: what ends a sample.
        may_send: while it is clear, samples wait here.
        sent: told the name of each sample that leaves.
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
        """SGLang's last answer about a sample, to be waited for; cancelled, it is not sent."""
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
        """End all calls; SGLang drops what was in them."""
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
                if not answer.done():  # nobody waits for it any more
                    answer.set_result(found)
