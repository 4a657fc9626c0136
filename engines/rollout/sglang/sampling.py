"""Has SGLang's server compute samples, and holds samples back while it is paused.

Samples of one `generate` call that are put in during one iteration of the event loop form one call
of the server, in their order.
Promises: the requested distribution is sampled, or the request is refused. A sample starts in its
seed's stream where its prefix or draw offset says, so a continued sample equals an uninterrupted
one up to rounding. Nothing is sent while samples are held back. SGLang is told to drop cancelled
samples.
Does not promise that samples of one call fail alone: if SGLang refuses one, all do.
"""

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from engines.errors import RolloutError
from engines.rollout.served.sampler import RunningSample, follow
from engines.rollout.sglang.server import Client, Server
from engines.rollout.transformers.scheduler import GAMMA, stream_starts
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError

GENERATE = "/generate"
MIN_TEMPERATURE = 1e-5
"""SGLang treats a smaller temperature as 0."""
OFF = -1
Answer = asyncio.Future[Any]


def check_temperature(request: RolloutRequest) -> None:
    """Refuse a temperature that SGLang would silently change."""
    temperature = request.sampling.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise RolloutError(
            f"{request.request_id}: temperature is {temperature}; SGLang takes it for 0; use 0, or "
            f"{MIN_TEMPERATURE} and more"
        )


def stream_start(sample: RunningSample) -> int:
    """Return the int64 stream start that gives a sample its next number at its next position.

    SGLang counts positions of prompt and prefix from 0, the stream counts draws.
    """
    request, place = sample.request, sample.place
    start = int(stream_starts([request.seeds[place]]))
    num_behind = request.draw_offset(place) - (len(sample.token_ids) - 1)
    return (start + num_behind * GAMMA + 2**63) % 2**64 - 2**63


def batch_body(samples: Sequence[RunningSample], eos_token_ids: Collection[int]) -> dict[str, Any]:
    """Return the request body for samples: token ids and logprobs, as a stream of answers.

    Each sample is answered at its end; one with stop strings after each step.
    """
    return {
        "rid": [sample.name for sample in samples],
        "input_ids": [sample.token_ids for sample in samples],
        "return_logprob": True,
        "logprob_start_len": OFF,
        "stream": True,
        "sampling_params": [_sampling(sample, eos_token_ids) for sample in samples],
    }


def _sampling(sample: RunningSample, eos_token_ids: Collection[int]) -> dict[str, Any]:
    sampling, form = sample.request.sampling, dict[str, str]()
    if asked := sampling.structured_output:
        if asked.json_schema:
            form = {"json_schema": asked.json_schema}
        else:
            choice = "|".join(f"({re.escape(each)})" for each in asked.choice)
            form = {"regex": asked.regex or choice}
    return {
        "max_new_tokens": sample.num_left,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or OFF,
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": stream_start(sample),
        "stream_interval": sample.num_left + 1 if sample.text is None else 1,
        **form,
    }


def completion(
    sample: RunningSample,
    answer: Mapping[str, Any],
    eos_token_ids: Collection[int],
    num_until_stop: int | None = None,
) -> Completion:
    """Convert SGLang's last answer, up to the `num_until_stop` tokens that complete a stop string.

    Raises:
        RolloutError: a token lacks its logprob or version, or SGLang ended it for its own reasons.
    """
    meta, sampling, token_ids = answer["meta_info"], sample.request.sampling, answer["output_ids"]
    reason = "stop"
    if num_until_stop is None:
        reason = meta["finish_reason"]["type"]
        ends = {*eos_token_ids, *sampling.stop_token_ids}
        is_ours = {
            "abort": sample.aborted,
            "length": len(token_ids) == sample.num_left,
            "stop": bool(token_ids) and token_ids[-1] in ends,
        }
        if not is_ours.get(reason, False):
            raise RolloutError(
                f"{sample.name}: SGLang ended it after {len(token_ids)} tokens: "
                f"{json.dumps(meta['finish_reason'])}"
            )
    # SGLang does not distinguish top-k 1 from temperature 0; with top-k 1 the logprob is 0.
    certain = sampling.top_k == 1 and sampling.temperature > 0
    return sample.completion(
        tuple(token_ids),
        [0.0 if certain else row[0] for row in meta.get("output_token_logprobs") or []],
        [
            (int(span["version"]), span["start"], span["end"])
            for span in meta.get("weight_versions") or []
        ],
        reason,
        num_until_stop,
    )


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
        answer: Answer = asyncio.get_running_loop().create_future()
        if sample.call not in self._waiting:
            self._waiting[sample.call] = []
            task = asyncio.create_task(self._send(sample.call))
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
        body = batch_body([sample for sample, _ in rows], self._eos_token_ids)
        error = RolloutError(f"SGLang said nothing of the end of {len(left)} samples or more")
        try:
            async with aclosing(self._client.stream(GENERATE, body)) as found:
                async for each in found:
                    if each["meta_info"]["finish_reason"] is not None:
                        answer = left.pop(each["meta_info"]["id"])
                        if not answer.done():  # the sample may be cancelled
                            answer.set_result(each)
        except RolloutError as refusal:
            error = refusal
        finally:
            for answer in left.values():
                if not answer.done():
                    answer.set_exception(error)


ABORT_WAITS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays between repeated aborts: SGLang ignores an abort that arrives before its sample."""
TELL_DEADLINE_S = 20.0
"""SGLang answers an abort at once; shorter than the deadline to close a replica."""


class SglangSampler:
    """See `engines.rollout.served.sampler.Sampler`."""

    def __init__(self, server: Server, client: Client, eos_token_ids: frozenset[int]) -> None:
        self._server, self._client, self._eos_token_ids = server, client, eos_token_ids
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
        call = asyncio.create_task(self._call(sample))
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

        async def end() -> None:
            self._drop(sample.name)

        body = batch_body([sample], self._eos_token_ids)
        async with aclosing(self._client.stream(GENERATE, body)) as answers:
            # To the last answer, since only that one has the versions of the tokens.
            answer, num_until_stop = await follow(
                sample.text,
                answers,
                lambda found: (found["output_ids"], bool(found["meta_info"]["finish_reason"])),
                end,
            )
        if answer is None:
            raise RolloutError(f"{sample.name}: SGLang said nothing")
        return completion(sample, answer, self._eos_token_ids, num_until_stop)

    def _drop(self, name: str) -> None:
        task = asyncio.create_task(self._tell_abort(name))
        self._dropping.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: "asyncio.Task[None]") -> None:
        self._dropping.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved; other samples report the same error

    async def _tell_abort(self, name: str) -> None:
        try:
            async with asyncio.timeout(TELL_DEADLINE_S):
                await self._client.call("/abort_request", {"rid": name})
        except TimeoutError:
            raise DeadlineError(f"SGLang to hear that {name} is aborted", TELL_DEADLINE_S) from None
