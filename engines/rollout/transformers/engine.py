"""The project's own rollout engine: any transformers causal LM, continuous batching, CPU or GPU.

Promises: the contract of `engines.rollout.base`. Requests of several `generate` calls share one
running batch. Samples in flight are recomputed after a weight update.
Does not promise: progress while another coroutine blocks the event loop, since a step (one token
per row) runs in the loop's thread; equal logits in different batches, see `sampling`.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from engines.config.rollout import RolloutConfig
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.base import Capability, Health, RolloutEngine, SleepLevel
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest, check_prompts
from engines.rollout.request_check import check_requests
from engines.rollout.stop_strings import StopStrings
from engines.rollout.transformers.inference_model import InferenceModel
from engines.rollout.transformers.options import TransformersOptions
from engines.rollout.transformers.running_batch import PromptReader, RunningBatch
from engines.rollout.transformers.scheduler import Sample, Scheduler
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from hardware.base import PlatformBase
from infra.errors import DeadlineError

NO_VERSION = -1
Item = TypeVar("Item")


class TransformersEngine(RolloutEngine):
    """Rollout engine on transformers; a ConfigError for bad options or an unsupported model."""

    capabilities = frozenset(
        {
            Capability.SLEEP_FREES_MEMORY,
            Capability.EXACT_CONTINUATION,
            Capability.PROMPT_LOGPROBS,
            Capability.PROMPT_LOGPROBS_AT_ANY_TEMPERATURE,
            Capability.IMAGES,
        }
    )

    def __init__(
        self, hf_dir: Path, rollout: RolloutConfig, dtype: str, platform: PlatformBase
    ) -> None:
        options = TransformersOptions.model_validate(rollout.options)
        self._timeout_s = rollout.timeout_s
        self._model = InferenceModel(hf_dir, getattr(torch, dtype), platform.device())
        self._batch = RunningBatch(
            self._model, rollout.max_num_sequences, options.max_prefill_tokens
        )
        self._reader = PromptReader(self._model, options.max_prefill_tokens)
        self._scheduler = Scheduler(rollout.max_num_sequences)
        self._stop_strings = StopStrings(hf_dir)
        self._calls: dict[int, asyncio.Queue[Completion | RolloutError]] = {}
        self._taken: dict[int, set[tuple[str, int]]] = {}
        self._call_ids = itertools.count()
        self._driver: asyncio.Task[None] | None = None
        self._version = NO_VERSION
        self._pending: tuple[int, str] | None = None
        self._paused = self._asleep = self._closed = False

    @property
    def version(self) -> int:
        """See the base class; also -1 from the start of an update until it is confirmed."""
        return self._version

    @property
    def num_running(self) -> int:
        """Number of samples in the running batch."""
        return len(self._batch.samples)

    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """See the base class. Requests are checked and queued at the call, before iteration."""
        if not self._can_serve():
            raise RolloutError(self._refusal())
        taken = itertools.chain.from_iterable(self._taken.values())
        check_requests(
            requests,
            taken,
            self._model.context_length,
            self._model.vocab_size,
            images=self._model.sees,
        )
        call = next(self._call_ids)
        samples = [sample for request in requests for sample in self._samples_of(request, call)]
        self._calls[call] = asyncio.Queue()
        self._taken[call] = {sample.key for sample in samples}
        self._scheduler.add(samples)
        stream = self._stream(call, requests)
        weakref.finalize(stream, self._forget, call)  # for a stream that is never iterated
        return stream

    def _samples_of(self, request: RolloutRequest, call: int) -> list[Sample]:
        ends = self._model.eos_token_ids | set(request.sampling.stop_token_ids)
        return [
            Sample(request, place, call, ends, self._stop_strings.follow(request, place))
            for place in range(request.num_samples)
        ]

    async def update_weights(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class. Samples in flight need `pause` first; they continue after it."""
        if self._closed or self._asleep:
            raise WeightSyncError(self._refusal())
        if version < 0:
            raise WeightSyncError(f"version: got {version}; need 0 or more")
        in_flight = self._batch.samples or self._scheduler.waiting
        if in_flight and not self._paused:
            raise WeightSyncError("samples are in flight; drain, pause or abort them first")
        for sample in self._batch.samples:
            sample.stamp(self._version)
        # The cache was computed with the old weights.
        self._scheduler.send_back(self._batch.clear())
        self._version, self._pending = NO_VERSION, None
        held = self._model.load(source.tensors())
        self._pending = (version, held.digest)
        return held

    async def finish_update(self, version: int, digest: str) -> None:
        """See the base class."""
        if self._pending is None:
            raise WeightSyncError(f"version {version}: no complete update is waiting for it")
        if self._pending != (version, digest):
            raise WeightSyncError(
                f"asked to serve version {version} with digest {digest}, hold version "
                f"{self._pending[0]} with {self._pending[1]}"
            )
        self._version, self._pending = version, None

    async def pause(self) -> None:
        """See the base class."""
        self._paused = True

    async def resume(self) -> None:
        """See the base class; also a RolloutError without confirmed weights."""
        if not self._can_serve():
            raise RolloutError(self._refusal())
        self._paused = False
        self._start_driver()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See the base class."""
        wanted = None if request_ids is None else set(request_ids)
        for sample in self._take(lambda s: wanted is None or s.request.request_id in wanted):
            self._deliver(sample, "abort")

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """See the base class."""
        if not self._can_serve():
            raise RolloutError(self._refusal())
        return self._model.score(sequences, temperature)

    async def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """See the base class. Other coroutines run between two forward passes."""
        if not self._can_serve():
            raise RolloutError(self._refusal())
        check_prompts(
            requests, self._model.context_length, self._model.vocab_size, any_temperature=True
        )
        found: dict[str, PromptLogprobs] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                for answers in self._reader.read(requests):
                    found |= {answer.request_id: answer for answer in answers}
                    await asyncio.sleep(0)
                    if not self._can_serve():
                        raise RolloutError(self._refusal())
        except TimeoutError:
            what = f"logprobs of {len(requests) - len(found)} sequences"
            raise DeadlineError(what, self._timeout_s) from None
        return [found[request.request_id] for request in requests]

    async def sleep(self, level: SleepLevel = "weights") -> None:
        """See the base class; a RolloutError while samples are in flight."""
        if self._batch.samples or self._scheduler.waiting:
            raise RolloutError("samples are in flight; drain or abort them before sleep")
        self._batch.free()
        if level == "weights":
            self._model.release()
            self._asleep, self._version, self._pending = True, NO_VERSION, None

    async def wake_up(self) -> None:
        """See the base class."""
        if self._asleep:
            self._model.allocate()
        self._asleep = False

    async def health(self) -> Health:
        """See the base class."""
        in_flight = len(self._batch.samples) + len(self._scheduler.waiting)
        return Health(self._can_serve(), self._version, in_flight)

    async def close(self) -> None:
        """See the base class. Requests in flight are delivered as `abort`."""
        if self._closed:
            return
        await self.abort()
        await self.sleep()
        self._closed = True

    def _can_serve(self) -> bool:
        return self._version != NO_VERSION and not self._asleep and not self._closed

    def _refusal(self) -> str:
        if self._closed:
            return "the rollout engine is closed"
        if self._asleep:
            return "the rollout engine is asleep; wake it up and send it weights"
        return "the rollout engine has no confirmed weights; send them first"

    async def _stream(
        self, call: int, requests: Sequence[RolloutRequest]
    ) -> AsyncIterator[Completion]:
        queue = self._calls[call]
        num_open = sum(request.num_samples for request in requests)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            self._start_driver()
            while num_open:
                try:
                    item = queue.get_nowait() if not queue.empty() else await _next(queue, deadline)
                except TimeoutError:
                    what = f"{num_open} samples of {len(requests)} requests"
                    raise DeadlineError(what, self._timeout_s) from None
                if isinstance(item, RolloutError):
                    raise item
                num_open -= 1
                yield item
        finally:
            self._forget(call)
            self._take(lambda sample: sample.call == call)

    def _forget(self, call: int) -> None:
        self._calls.pop(call, None)
        self._taken.pop(call, None)

    def _start_driver(self) -> None:
        if self._calls and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._report_failure)

    async def _drive(self) -> None:
        while self._can_serve() and not self._paused:
            if not self._batch.samples and not self._scheduler.waiting:
                return
            finished = self._step()
            if not self._batch.samples and not self._scheduler.waiting:
                self._batch.free()  # before delivery: training may then start and needs the memory
            for sample in finished:
                self._deliver(sample, "stop" if sample.stopped else "length")
            await asyncio.sleep(0)

    def _step(self) -> list[Sample]:
        finished: list[Sample] = []
        prefixes = self._scheduler.next_prefixes(len(self._batch.samples))
        if prefixes:
            waiting = self._scheduler.waiting
            finished += self._batch.join(prefixes, waiting[0] if waiting else None)
        if self._batch.samples:
            finished += self._batch.decode()
        return finished

    def _report_failure(self, driver: "asyncio.Task[None]") -> None:
        if driver.cancelled() or (error := driver.exception()) is None:
            return
        self._batch.clear()
        self._scheduler.remove(lambda _: True)
        for queue in self._calls.values():
            failure = RolloutError(f"sampling failed: {error}")
            failure.__cause__ = error
            queue.put_nowait(failure)

    def _take(self, condition: Callable[[Sample], bool]) -> list[Sample]:
        rows = [row for row, sample in enumerate(self._batch.samples) if condition(sample)]
        return self._batch.remove(rows) + self._scheduler.remove(condition)

    def _deliver(self, sample: Sample, finish_reason: str) -> None:
        queue = self._calls.get(sample.call)
        if queue is not None:
            queue.put_nowait(sample.completion(finish_reason, self._version))


async def _next(queue: "asyncio.Queue[Item]", deadline: float) -> Item:
    async with asyncio.timeout_at(deadline):
        return await queue.get()
