"""Runs single samples through SGLang and holds samples back while it is paused.

Promises: nothing is sent while samples are held back; SGLang is told to drop cancelled samples; a
sample with stop strings ends at the first one.

Sends samples that start together to SGLang in one call and returns each when it is finished.

Samples of one `generate` call that are put in during one iteration of the event loop form one call
of the server, in their order. If SGLang refuses one sample, the others of its call fail too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any

from engines.errors import RolloutError
from engines.rollout.served.sampler import RunningSample
from engines.rollout.sglang.server import Client, Server
from engines.rollout.sglang.translation import batch_body, completion
from engines.types import Completion
from infra.errors import DeadlineError

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


ABORT_WAITS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays between repeated aborts: SGLang ignores an abort that arrives before its sample."""
TELL_DEADLINE_S = 20.0
"""SGLang answers an abort at once; shorter than the deadline to close a replica."""


class SglangSampler:
    """See `engines.rollout.served.sampler.Sampler`."""

    def __init__(self, server: Server, client: Client, eos_token_ids: frozenset[int]) -> None:
        self._server = server
        self._client = client
        self._eos_token_ids = eos_token_ids
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._calls: dict[str, asyncio.Task[Completion]] = {}
        self._unsent: set[str] = set()
        self._batches = BatchedCalls(client, eos_token_ids, self._may_send, self._unsent.discard)
        self._dropping: set[asyncio.Task[None]] = set()

    @property
    def is_lost(self) -> bool:
        """See `Sampler`."""
        return self._server.is_lost

    def hold_back(self) -> None:
        """Send no sample from now on."""
        self._may_send.clear()

    def let_pass(self) -> None:
        """Undo `hold_back`."""
        self._may_send.set()

    async def sample(self, sample: RunningSample) -> Completion:
        """See `Sampler`. A sample that is aborted before it was sent comes out empty."""
        call = asyncio.get_running_loop().create_task(self._call(sample))
        self._calls[sample.name] = call
        self._unsent.add(sample.name)
        try:
            await asyncio.wait({call})
        finally:
            if not call.done():  # cancelled
                call.cancel()
                if sample.name not in self._unsent:
                    self._drop(sample.name)
            self._unsent.discard(sample.name)
            del self._calls[sample.name]
        return sample.empty() if call.cancelled() else call.result()

    async def abort(self, names: Sequence[str]) -> None:
        """End these samples and wait; a sample that SGLang does not end comes out empty."""
        calls = {name: self._calls[name] for name in names if name in self._calls}
        for name in self._unsent & calls.keys():
            calls.pop(name).cancel()
        for wait_s in ABORT_WAITS_S:
            calls = {name: call for name, call in calls.items() if not call.done()}
            if not calls:
                return
            await asyncio.gather(*(self._tell_abort(name) for name in calls))
            await asyncio.wait(calls.values(), timeout=wait_s)
        for call in calls.values():
            call.cancel()

    async def close(self) -> None:
        """Cancel all calls, and wait until SGLang was told of all aborts."""
        await self._batches.close()
        if self._dropping:
            await asyncio.wait(self._dropping)

    async def _call(self, sample: RunningSample) -> Completion:
        if sample.text is None:
            return completion(sample, await self._batches.put(sample), self._eos_token_ids)
        await self._may_send.wait()
        self._unsent.discard(sample.name)
        body = batch_body([sample], self._eos_token_ids)
        async with aclosing(self._client.stream(GENERATE, body)) as answers:
            return await self._until_stop(sample, answers)

    async def _until_stop(self, sample: RunningSample, answers: AsyncIterator[Any]) -> Completion:
        """Follow a sample step by step, and end it at a stop string.

        SGLang's own stop strings ignore a prefix. It reports token versions only with its last
        answer, so that one is awaited.
        """
        answer: Any = None
        num_seen, num_until_stop = 0, None
        async for answer in answers:
            fresh = answer["output_ids"][num_seen:]
            if num_until_stop is None and (num := _num_until_stop(sample, fresh)) is not None:
                num_until_stop = num_seen + num
                if answer["meta_info"]["finish_reason"] is None:
                    self._drop(sample.name)
            num_seen += len(fresh)
        if answer is None:
            raise RolloutError(f"{sample.name}: SGLang said nothing")
        return completion(sample, answer, self._eos_token_ids, num_until_stop)

    def _drop(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._tell_abort(name))
        self._dropping.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: "asyncio.Task[None]") -> None:
        self._dropping.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved; other samples report the same error

    async def _tell_abort(self, name: str) -> None:
        try:
            async with asyncio.timeout(TELL_DEADLINE_S):
                await self._client.post("/abort_request", {"rid": name})
        except TimeoutError:
            raise DeadlineError(f"SGLang to hear that {name} is aborted", TELL_DEADLINE_S) from None


def _num_until_stop(sample: RunningSample, token_ids: Sequence[int]) -> int | None:
    return None if sample.text is None else sample.text.contains_stop(token_ids)
