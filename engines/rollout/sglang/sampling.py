"""Has SGLang's server compute samples, and holds samples back while it is paused.

Samples of one `generate` call that are put in during one iteration of the event loop form one call
of the server, in their order.
Promises: the requested distribution is sampled, or the request is refused. A sample starts in its
seed's stream where its prefix or draw offset says, so a continued sample equals an uninterrupted
one up to rounding. No sample is sent while samples are held back. SGLang is told to drop cancelled
samples.
Does not promise that samples of one call fail alone: if SGLang refuses one, all do.
"""

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from engines.errors import RolloutError
from engines.rollout.served.engine import RunningSample
from engines.rollout.sglang.server import Client
from engines.rollout.transformers.sampling import GAMMA, stream_starts
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError

GENERATE = "/generate"
MIN_TEMPERATURE = 1e-5
"""SGLang treats a smaller temperature as 0."""
OFF = -1
Answer = asyncio.Future[Any]
ABORT_WAITS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays between repeated aborts: SGLang ignores an abort that arrives before its sample."""
TELL_DEADLINE_S = 20.0
"""Deadline for SGLang to answer an abort; shorter than the deadline to close a replica."""


def check_temperature(request: RolloutRequest) -> None:
    """Refuse a temperature that SGLang would silently change."""
    temperature = request.sampling.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise RolloutError(
            f"{request.request_id}: temperature is {temperature}; SGLang takes it for 0; use 0, or "
            f"{MIN_TEMPERATURE} and more"
        )


def stream_start(sample: RunningSample) -> int:
    """Return the int64 stream start with which a sample's next token uses its next random number.

    SGLang indexes the stream by position, prompt included; we index it by sampled token.
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
        choice = "|".join(f"({re.escape(each)})" for each in asked.choice)
        schema = asked.json_schema
        form = {"json_schema": schema} if schema else {"regex": asked.regex or choice}
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
) -> Completion:
    """Convert SGLang's last answer.

    Raises:
        RolloutError: a token lacks its logprob or version, or SGLang ended the sample on its own.
    """
    meta, sampling, token_ids = answer["meta_info"], sample.request.sampling, answer["output_ids"]
    reason = "stop"
    if sample.num_until_stop is None:
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
    )


class SglangSampler:
    """Has the server compute samples; see `ServedEngine._sample`."""

    def __init__(self, client: Client, eos_token_ids: frozenset[int]) -> None:
        self._client, self._eos_token_ids = client, eos_token_ids
        self.may_send = asyncio.Event()
        """While it is clear, samples are held back."""
        self.may_send.set()
        self._unsent: dict[int, dict[RunningSample, Answer]] = {}
        """Samples held back, by number of their `generate` call."""
        self._answers: dict[str, Answer] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._dropping: set[asyncio.Task[None]] = set()

    async def sample(self, sample: RunningSample) -> Completion:
        """Return the finished sample; empty if it was aborted and SGLang gave no answer."""
        loop = asyncio.get_running_loop()
        answer = self._answers[sample.name] = loop.create_future()
        if sample.call not in self._unsent:
            self._unsent[sample.call] = {}
            task = loop.create_task(self._send(sample.call))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        self._unsent[sample.call][sample] = answer
        try:
            await asyncio.wait({answer})
        finally:
            del self._answers[sample.name]
            if not answer.done():  # cancelled
                answer.cancel()
                if sample not in self._unsent.get(sample.call, {}):
                    self._drop(sample.name)
        if answer.cancelled():
            return sample.empty()
        return completion(sample, answer.result(), self._eos_token_ids)

    async def abort(self, names: Sequence[str]) -> None:
        """End the named samples and wait; one that SGLang does not end is returned empty."""
        answers = {name: self._answers[name] for name in names if name in self._answers}
        unsent = {sample.name for samples in self._unsent.values() for sample in samples}
        for name in unsent & answers.keys():
            answers.pop(name).cancel()
        for wait_s in ABORT_WAITS_S:
            answers = {name: answer for name, answer in answers.items() if not answer.done()}
            if not answers:
                return
            await asyncio.gather(*(self._tell_abort(name) for name in answers))
            await asyncio.wait(answers.values(), timeout=wait_s)
        for answer in answers.values():
            answer.cancel()

    async def close(self) -> None:
        """Cancel all calls, and wait until SGLang was told of all aborts."""
        for task in self._sending:
            task.cancel()
        if tasks := self._sending | self._dropping:
            await asyncio.wait(tasks)

    async def _send(self, call: int) -> None:
        await self.may_send.wait()
        rows = self._unsent.pop(call).items()
        left = {sample.name: (sample, answer) for sample, answer in rows if not answer.done()}
        if not left:
            return
        body = batch_body([sample for sample, _ in left.values()], self._eos_token_ids)
        error = RolloutError(f"SGLang ended its answer before all of {len(left)} samples had ended")
        try:
            async with aclosing(self._client.stream(GENERATE, body)) as found:
                async for each in found:
                    sample, answer = left[each["meta_info"]["id"]]
                    must_end = sample.reaches_stop(each["output_ids"])
                    if each["meta_info"]["finish_reason"] is not None:
                        del left[sample.name]
                        if not answer.done():  # the sample may be cancelled
                            answer.set_result(each)
                    elif must_end:  # its last answer has the versions of its tokens
                        self._drop(sample.name)
        except RolloutError as refusal:
            error = refusal
        except (KeyError, TypeError, ValueError) as unreadable:
            error = RolloutError(f"an answer of SGLang cannot be read: {unreadable!r}")
            error.__cause__ = unreadable
        finally:
            for _, answer in left.values():
                if not answer.done():
                    answer.set_exception(error)

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
                await self._client.call("/abort_request", {"rid": name})
        except TimeoutError:
            raise DeadlineError(f"SGLang to hear that {name} is aborted", TELL_DEADLINE_S) from None
