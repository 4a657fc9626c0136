"""The project's own rollout engine: models of transformers, continuous batching, CPU or GPU.

Promises: the contract of `engines.rollout.base`. Requests of several `generate` calls share one
running batch. Samples in flight are recomputed after a weight update, and after they gave way to
longer ones for lack of memory.
Does not promise: progress while another coroutine blocks the event loop, since a step (one token
per row) runs in the loop's thread; equal logits in different batches, see `sampling`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

import torch

from engines.config.rollout import RolloutConfig
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.base import ALL_MEMORY, Capability, Health, MemoryTag, SleepLevel
from engines.rollout.engine_state import NO_VERSION, StatefulEngine
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest, check_prompts
from engines.rollout.request_check import check_requests
from engines.rollout.stop_strings import StopStrings
from engines.rollout.transformers.inference_model import InferenceModel
from engines.rollout.transformers.options import TransformersOptions
from engines.rollout.transformers.running_batch import RunningBatch, read_prompts
from engines.rollout.transformers.scheduler import Prefix, Sample, Scheduler
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from hardware.base import PlatformBase
from infra.errors import DeadlineError

FREE_SHARE = 0.8
"""Share of the free device memory for the cache; prefills, logits and graphs need the rest."""
logger = logging.getLogger(__name__)


class TransformersEngine(StatefulEngine):
    """Rollout engine on transformers; creating it raises ConfigError for unsupported models."""

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
        super().__init__(rollout.timeout_s)
        self._model = InferenceModel(hf_dir, getattr(torch, dtype), platform.device())
        self._platform = platform
        self._max_prefill_tokens = options.max_prefill_tokens
        self._cache_bytes = options.kv_cache_bytes
        self._batch = RunningBatch(
            self._model,
            rollout.max_num_sequences,
            options.max_prefill_tokens,
            lambda: None if options.enforce_eager else platform.graph_capture(self._model.device),
        )
        self._scheduler = Scheduler(rollout.max_num_sequences)
        self._stop_strings = StopStrings(hf_dir)
        self._driver: asyncio.Task[None] | None = None

    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """See the base class. Requests are checked and queued at the call, before iteration."""
        self._check_can_serve()
        check_requests(
            requests,
            self._keys_in_flight(),
            self._model.context_length,
            self._model.vocab_size,
            images=self._model.sees,
        )
        self._check_room(requests)
        call = next(self._call_numbers)
        self._scheduler.add([
            Sample(
                request,
                place,
                call,
                self._model.eos_token_ids,
                self._stop_strings.follow(request, place) if request.sampling.stop else None,
            )
            for request in requests
            for place in range(request.num_samples)
        ])  # fmt: skip
        return self._open_call(call, requests)

    async def update_weights(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class. Samples in flight need `pause` first; they continue after it."""
        self._check_can_update(version)
        if self._num_in_flight and not self._paused:
            raise WeightSyncError("samples are in flight; drain, pause or abort them first")
        for sample in self._batch.samples:
            sample.stamp(self._version)
        # The cache was computed with the old weights.
        self._scheduler.send_back(self._batch.clear())
        self._version, self._pending = NO_VERSION, None
        held = self._model.load(source.tensors(), source.checksum_method)
        self._pending = (version, held.digest)
        return held

    async def pause(self) -> None:
        """See the base class."""
        self._paused = True

    async def resume(self) -> None:
        """See the base class; also raises RolloutError without confirmed weights."""
        self._check_can_serve()
        self._paused = False
        self._start_sampling()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See the base class."""
        wanted = None if request_ids is None else set(request_ids)
        for sample in self._take(lambda s: wanted is None or s.request.request_id in wanted):
            self._deliver(sample.call, sample.completion("abort", self._version))

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """See the base class."""
        self._check_can_serve()
        return self._model.score(sequences, temperature)

    async def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """See the base class. Other coroutines run between two forward passes."""
        self._check_can_serve()
        check_prompts(
            requests, self._model.context_length, self._model.vocab_size, any_temperature=True
        )
        found: dict[str, PromptLogprobs] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                for answers in read_prompts(self._model, requests, self._max_prefill_tokens):
                    found |= {answer.request_id: answer for answer in answers}
                    await asyncio.sleep(0)
                    self._check_can_serve()
        except TimeoutError:
            raise DeadlineError(
                f"logprobs of {len(requests) - len(found)} sequences", self._timeout_s
            ) from None
        return [found[request.request_id] for request in requests]

    async def sleep(self, level: SleepLevel = "weights") -> None:
        """See the base class; raises RolloutError while samples are in flight."""
        if self._num_in_flight:
            raise RolloutError("samples are in flight; drain or abort them before sleep")
        self._batch.free()
        if level == "weights":
            self._model.release()
            self._version, self._pending = NO_VERSION, None
            self._sleeping.update(ALL_MEMORY)
        self._platform.empty_cache()  # the trainer may be another process

    async def wake_up(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        """See the base class. The cache is allocated when samples need it."""
        if "weights" in self._sleeping.intersection(tags):
            self._model.allocate()
        self._sleeping.difference_update(tags)

    async def health(self) -> Health:
        """See the base class."""
        return Health(self._can_serve(), self._version, self._num_in_flight)

    def held_bytes(self) -> tuple[int, int]:
        """See the base class."""
        return self._model.size_bytes, self._batch.take_largest_cache_bytes()

    async def close(self) -> None:
        """See the base class. Requests in flight are delivered as `abort`."""
        if not self._closed:
            await self.abort()
            await self.sleep()
            self._closed = True

    @property
    def _num_in_flight(self) -> int:
        return len(self._batch.samples) + len(self._scheduler.waiting)

    def _check_room(self, requests: Sequence[RolloutRequest]) -> None:
        """Set the limit of the cache if the batch is empty; refuse a sample that is above it."""
        if not self._num_in_flight:
            free_bytes = self._platform.free_memory_bytes()
            limit = None if free_bytes is None else int(FREE_SHARE * free_bytes)
            self._batch.limit_cache(self._cache_bytes or limit)
        for request in requests:
            num_tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
            if lacking := self._batch.lacking_bytes(num_tokens):
                raise RolloutError(
                    f"rollout.options.kv_cache_bytes: got {self._cache_bytes or 'null'}; need "
                    f"{lacking} for a sample of up to {num_tokens} tokens; raise it, or lower "
                    "max_new_tokens"
                )

    def _start_sampling(self) -> None:
        if self._calls and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._report_failure)

    def _end_call(self, call: int) -> None:
        self._forget_call(call)
        self._take(lambda sample: sample.call == call)

    async def _drive(self) -> None:
        while self._num_in_flight and self._can_serve() and not self._paused:
            prefixes = self._scheduler.next_prefixes(len(self._batch.samples), self._batch.fits)
            try:
                finished = self._sample_tokens(prefixes)
            except torch.OutOfMemoryError as error:
                finished = self._make_room(prefixes, error)
            if not self._num_in_flight:
                self._batch.free()  # before delivery: training may then start and needs the memory
            for sample in finished:
                reason = "stop" if sample.stopped else "length"
                self._deliver(sample.call, sample.completion(reason, self._version))
            await asyncio.sleep(0)

    def _sample_tokens(self, prefixes: Sequence[Prefix]) -> list[Sample]:
        """Take samples in, then sample a token per row; return the finished samples."""
        finished: list[Sample] = []
        if prefixes:
            finished += self._batch.join(prefixes, next(iter(self._scheduler.waiting), None))
        self._scheduler.send_back(self._batch.without_room())
        if self._batch.samples:
            finished += self._batch.decode()
        return finished

    def _make_room(self, joining: Sequence[Prefix], error: torch.OutOfMemoryError) -> list[Sample]:
        """Queue all samples again, for a smaller cache; return those that were just finished."""
        held = dict.fromkeys(self._batch.shrink())
        held |= dict.fromkeys(sample for prefix in joining for sample in prefix.samples)
        if len(held) == 1:
            raise error
        logger.warning("%d samples start again with half the cache: %s", len(held), error)
        self._platform.empty_cache()
        self._scheduler.send_back([sample for sample in held if not sample.is_finished])
        return [sample for sample in held if sample.is_finished]

    def _report_failure(self, driver: "asyncio.Task[None]") -> None:
        if driver.cancelled() or (error := driver.exception()) is None:
            return
        self._batch.free()
        self._scheduler.remove(lambda _: True)
        for call in self._calls:
            failure = RolloutError(f"sampling failed: {error}")
            failure.__cause__ = error
            self._deliver(call, failure)

    def _take(self, condition: Callable[[Sample], bool]) -> list[Sample]:
        rows = [row for row, sample in enumerate(self._batch.samples) if condition(sample)]
        return self._batch.remove(rows) + self._scheduler.remove(condition)
