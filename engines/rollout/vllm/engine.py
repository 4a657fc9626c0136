"""The rollout engine vllm: vLLM's AsyncLLM in processes of its own, which read the weights there.

Promises: the contract of `engines.rollout.base`; the prefix cache is forgotten with the weights
it was computed from; samples that were paused during an update are computed anew up to where
they stood, and each token carries the version that sampled it; `close` ends every process that
vLLM started.
Not promised: the same tokens for a seed as another engine draws; a quick start (see
`engines.rollout.vllm.launch`); `score` while paused, since vLLM then computes nothing at all.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

from engines.config.rollout import RolloutConfig
from engines.errors import ReplicaLostError, RolloutError, WeightSyncError
from engines.rollout.base import Capability, Health, RolloutEngine, SleepLevel
from engines.rollout.request_check import check_requests
from engines.rollout.stop_strings import StopStrings
from engines.rollout.vllm import launch
from engines.rollout.vllm.in_flight import InFlight
from engines.rollout.vllm.model_layout import read_layout
from engines.rollout.vllm.scoring import score_sequence
from engines.rollout.vllm.translation import check_temperature
from engines.rollout.vllm.weight_order import agreed, order_of
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import Receipt, WeightSource
from hardware.base import PlatformBase
from infra.errors import DeadlineError
from infra.faults import fault

NO_VERSION = -1
SHUTDOWN_TIMEOUT_S = 30.0


class VllmEngine(RolloutEngine):
    """See the module. Starts vLLM's processes before it returns.

    Args:
        hf_dir: model directory; only its configuration is read, weights come by updates.
        rollout: capacity, deadline and options.
        dtype: `float32` or `bfloat16`.
        platform: where it runs.

    Raises:
        ConfigError: bad options, no model configuration, or vLLM refuses the two together.
    """

    capabilities = frozenset({Capability.SHARED_MEMORY})

    def __init__(
        self, hf_dir: Path, rollout: RolloutConfig, dtype: str, platform: PlatformBase
    ) -> None:
        self._layout = read_layout(hf_dir)
        self._dtype = dtype
        self._timeout_s = rollout.timeout_s
        self._llm: Any = launch.start(hf_dir, rollout, dtype, platform, self._layout)
        config = self._llm.vllm_config
        self._context_length: int = config.model_config.max_model_len
        self._frees_memory = launch.sleep_frees_memory()
        stop_strings = StopStrings(hf_dir)
        own = {
            Capability.PREFIX_CACHE: config.cache_config.enable_prefix_caching,
            Capability.STRUCTURED_OUTPUT: not config.model_config.skip_tokenizer_init,
            Capability.SLEEP_FREES_MEMORY: self._frees_memory,
        }
        # Of this very engine: they depend on its options and its platform.
        self.capabilities = VllmEngine.capabilities | {c for c, has in own.items() if has}  # pyright: ignore[reportAttributeAccessIssue]
        self._in_flight = InFlight(
            self._llm, self._layout.eos_token_ids, stop_strings, rollout.timeout_s
        )
        self._score_numbers = itertools.count()
        self._num_scoring = 0
        self._version = NO_VERSION
        self._pending: tuple[int, str] | None = None
        self._asleep: SleepLevel | None = None
        self._paused = self._closed = False

    @property
    def version(self) -> int:
        """See the base class; also -1 from the start of an update until it is confirmed."""
        return self._version

    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """See the base class. Requests are checked at the call, not at the first completion.

        From the call on they are in line, and their samples taken until the call has ended.
        """
        self._check_can_serve()
        check_requests(
            requests,
            self._in_flight.sample_keys,
            self._context_length,
            self._layout.vocab_size,
            structured_output=Capability.STRUCTURED_OUTPUT in self.capabilities,
        )
        for request in requests:
            check_temperature(request)
        return self._in_flight.start(requests)

    async def update_weights(self, source: WeightSource, version: int) -> Receipt:
        """See the base class. Samples in flight need `pause` first; they continue after it."""
        if self._closed or self._asleep:
            raise WeightSyncError(self._refusal())
        if version < 0:
            raise WeightSyncError(f"version: got {version}; need 0 or more")
        if self._num_scoring or (self._in_flight and not self._paused):
            raise WeightSyncError("samples are in flight; drain, pause or abort them first")
        order = order_of(source, self._layout, self._dtype)
        self._version, self._pending = NO_VERSION, None
        replies = await self._wait(
            self._llm.collective_rpc("receive_weights", args=(order,)),
            "the workers to load weights",
        )
        receipt = agreed(replies)
        if not fault("vllm.prefix_reset"):
            # Of samples that are paused, too: what they hold was computed by the old weights.
            await self._wait(self._llm.reset_prefix_cache(True), "vLLM to forget its cache")
        self._pending = (version, receipt.digest)
        return receipt

    async def finish_update(self, version: int, digest: str) -> None:
        """See the base class."""
        if self._pending is None:
            raise WeightSyncError(f"version {version}: no complete update is waiting for it")
        if self._pending != (version, digest):
            raise WeightSyncError(
                f"asked to serve version {version} with digest {digest}, hold version "
                f"{self._pending[0]} with {self._pending[1]}"
            )
        await self._wait(self._llm.update_weight_version(str(version)), "vLLM to note the version")
        # Asked once here, so that vLLM takes a request without giving way to anything else.
        await self._wait(self._llm.get_supported_tasks(), "vLLM to say what it can do")
        self._version, self._pending = version, None

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """See the base class. Refused while paused, and for a sequence that fills the context."""
        self._check_can_serve()
        if self._paused:
            raise RolloutError("vLLM computes nothing while it is paused; resume it first")
        for ids in sequences:
            if not 2 <= len(ids) < self._context_length:
                raise RolloutError(
                    f"got a sequence of {len(ids)} tokens; need 2 to {self._context_length - 1}"
                )
        self._num_scoring += 1
        try:
            return [
                await self._wait(
                    score_sequence(
                        self._llm, ids, temperature, f"score/{next(self._score_numbers)}"
                    ),
                    "vLLM to score a sequence",
                )
                for ids in sequences
            ]
        finally:
            self._num_scoring -= 1

    async def pause(self) -> None:
        """See the base class."""
        await self._wait(
            self._llm.pause_generation(mode="keep", clear_cache=False), "vLLM to pause"
        )
        self._paused = True

    async def resume(self) -> None:
        """See the base class.

        Raises:
            RolloutError: no confirmed weights to continue with.
        """
        self._check_can_serve()
        await self._wait(self._llm.resume_generation(), "vLLM to resume")
        self._paused = False

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See the base class."""
        vllm_ids = self._in_flight.mark_aborted(request_ids)
        if vllm_ids:
            await self._wait(self._llm.abort(vllm_ids), "vLLM to abort")

    async def sleep(self, level: SleepLevel = "weights") -> None:
        """See the base class. Of either level nothing is sampled before `wake_up`."""
        if self._in_flight:
            raise RolloutError("samples are in flight; drain or abort them before sleep")
        await self.wake_up()
        if level == "weights":
            self._version, self._pending = NO_VERSION, None
            await self._wait(self._llm.sleep(level=2), "vLLM to sleep")
        else:
            await self._wait(self._llm.pause_generation(mode="abort"), "vLLM to pause")
            if self._frees_memory:
                await self._wait(self._llm.release_kv_cache_memory(), "vLLM to free its cache")
        self._asleep = level

    async def wake_up(self) -> None:
        """See the base class."""
        if self._asleep:
            await self._wait(self._llm.wake_up(), "vLLM to wake up")
            self._asleep = None
            if self._paused:
                await self.pause()

    async def health(self) -> Health:
        """See the base class; answers only if vLLM's own process does."""
        if not self._closed:
            await self._wait(self._llm.is_sleeping(), "vLLM to say how it is")
        return Health(self._can_serve(), self._version, len(self._in_flight))

    async def close(self) -> None:
        """See the base class. What is in flight comes out as `abort`."""
        if self._closed:
            return
        if not self._llm.errored:
            await self.abort()
        self._closed = True
        await self._in_flight.close()
        self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        self._llm = None  # its destructor fails when it comes at the end of the process

    def _can_serve(self) -> bool:
        serves = self._version != NO_VERSION and not self._asleep and not self._closed
        return serves and not self._llm.errored

    def _check_can_serve(self) -> None:
        if not self._closed and self._llm.errored:
            raise ReplicaLostError("vLLM has died; its own log lines say why")
        if not self._can_serve():
            raise RolloutError(self._refusal())

    def _refusal(self) -> str:
        if self._closed:
            return "the rollout engine is closed"
        if self._asleep:
            return "the rollout engine is asleep; wake it up first"
        return "the rollout engine has no confirmed weights; send them first"

    async def _wait(self, call: Awaitable[Any], what: str) -> Any:
        """Wait for vLLM, by the deadline."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise DeadlineError(what, self._timeout_s) from None
        except EngineDeadError as error:
            raise ReplicaLostError(f"vLLM died while we waited for {what}") from error
