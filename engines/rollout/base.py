"""Interface of a rollout engine: prompts in as token ids, completions out as they finish.

Promises: a sample depends on (weights, prompt, prefix, sampling parameters, its seed and draw
offset); what else is in flight changes at most the last bits of logits. Logprobs are those of the
sampling distribution. Every token carries the version of the weights that sampled it, and only
weights confirmed by `finish_update` are sampled from. A continued sample reuses no random number of
its prefix. The samples of one call advance together as far as capacity allows.
Does not promise: an order of completions; that a continued sample equals an uninterrupted one,
unless the engine has `EXACT_CONTINUATION`. Engines know nothing of rewards or training.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

from engines.config.options import check_options
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from hardware.base import PlatformBase
from infra.plugins import load_row

SleepLevel = Literal["kv", "weights"]
MemoryTag = Literal["weights", "cache"]
ALL_MEMORY: tuple[MemoryTag, ...] = ("weights", "cache")
NEED_IDLE = frozenset({"update_weights", "update_adapter", "sleep"})
"""Engine methods that raise while requests are in flight; updates accept paused ones."""
BEHIND_SERVICE_S = 60.0


class Capability(Enum):
    """Optional features of an engine; `rlhf engines` lists them."""

    PREFIX_CACHE = "prefix_cache"
    """Caches keys and values of prompts between requests; a weight sync must clear them."""
    SLEEP_FREES_MEMORY = "sleep_frees_memory"
    """`sleep` frees memory; without it, a sleeping engine only refuses to sample."""
    STRUCTURED_OUTPUT = "structured_output"
    """Supports `SamplingParams.structured_output`. Also stated in the engine's plugin row."""
    EXACT_CONTINUATION = "exact_continuation"
    """A sample that continues a prefix equals an uninterrupted one, up to rounding."""
    SHARED_MEMORY = "shared_memory"
    """Reads weights in processes of its own; the weight source must be readable there."""
    ADAPTERS = "adapters"
    """Takes an adapter beside its base weights; the engine is created with the adapter's shape."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Implements `prompt_logprobs`, so it can serve a teacher."""
    PROMPT_LOGPROBS_AT_ANY_TEMPERATURE = "prompt_logprobs_at_any_temperature"
    """Implements `prompt_logprobs` at temperatures other than 1, too."""
    FP8 = "fp8"
    """Multiplies 8-bit floats if `rollout.quantization` is `fp8`; every update quantizes anew."""
    IMAGES = "images"
    """Passes `RolloutRequest.images` to the model. Also stated in the engine's plugin row."""


@dataclass(frozen=True)
class Health:
    """State of an engine; `version` is -1 without weights, `num_running` counts its samples."""

    can_serve: bool
    version: int
    num_running: int


class RolloutEngine(ABC):
    """Interface of a rollout engine. All calls come from the same asyncio loop."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    num_workers: int = 1
    """Processes that share the model; each reads all weights through `WeightSource.of_worker`."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights being served; -1 without confirmed weights."""

    @abstractmethod
    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """Sample every request; yield each completion as soon as it is finished.

        No (request id, sample index) may occur twice or be in flight in another call; when a call
        has ended, its samples may be requested again.

        Raises:
            RolloutError: the engine cannot serve (no confirmed weights, asleep, closed or lost), or
                a request is refused by `check_requests`.
            DeadlineError: samples are unfinished after `rollout.timeout_s`.
        """

    @abstractmethod
    async def update_weights(self, source: WeightSource, version: int) -> WeightDigest:
        """Load new weights by Hugging Face name; return the digest of what the engine now holds.

        The caller must have drained, paused or aborted requests in flight. The source yields every
        parameter and persistent buffer in the dtype in which it is held. The engine holds incoming
        tensors only until their layer is complete. Once it has taken the first tensor it samples
        nothing before `finish_update`, also after an error.

        Raises:
            WeightSyncError: a name is unknown, missing, repeated, or has another shape or dtype.
        """

    async def update_adapter(self, source: WeightSource, version: int) -> WeightDigest:
        """Load a new adapter for the weights of the last `update_weights`, under its conditions.

        The source yields `lora_A.weight` (rank, in) and `lora_B.weight` (out, rank) of each module;
        one worker reads it. Raises WeightSyncError also if the engine holds no weights or takes no
        adapters.
        """
        raise WeightSyncError(f"{type(self).__name__} takes no adapters")

    @abstractmethod
    async def finish_update(self, version: int, digest: str) -> None:
        """Confirm the last update by its digest: from now on tokens are sampled from `version`.

        Raises:
            WeightSyncError: no such update is pending, or the engine's own digest differs.
        """

    @abstractmethod
    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Return the logprobs of each sequence's tokens but the first, under the served weights.

        Sequences have at least two tokens, the temperature is above 0. Raises RolloutError without
        confirmed weights.
        """

    async def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """Answer requests with distinct ids, in their order; needs the capability PROMPT_LOGPROBS.

        Memory for logits is bounded by the engine's step, not by the tokens of a call.

        Raises:
            RolloutError: no confirmed weights, no capability, or refused by `check_prompts`.
            DeadlineError: an answer took longer than `rollout.timeout_s`.
        """
        raise RolloutError(f"{type(self).__name__} cannot return logprobs of a prompt")

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling between two tokens; requests in flight keep their state."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests now (None: all); their partial samples get the finish reason `abort`.

        A `NEED_IDLE` method may be called right after, before the partial samples are consumed.
        """

    @abstractmethod
    async def sleep(self, level: SleepLevel = "weights") -> None:
        """Free the cache (`kv`) or everything (`weights`); requests in flight must be drained.

        After `wake_up` from `weights`, the weights must be updated again.
        """

    @abstractmethod
    async def wake_up(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        """Undo `sleep` for the tagged memory; what is awake stays so.

        With `weights` alone, updates are accepted and nothing is sampled until `cache` is awake
        too, so that a sender on the same device can leave it before the cache is allocated. An
        engine may lack the parameter; see `wake`.
        """

    @abstractmethod
    async def health(self) -> Health:
        """Return the engine's state."""

    def held_bytes(self) -> tuple[int, int]:
        """Return device memory held in this process: weights, largest cache since the last call."""
        return 0, 0

    @abstractmethod
    async def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""


async def wake(engine: RolloutEngine, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
    """Wake the tagged memory; an engine whose `wake_up` has no `tags` wakes wholly for weights."""
    if "tags" in inspect.signature(engine.wake_up).parameters:
        await engine.wake_up(tags)
    elif "weights" in tags:
        await engine.wake_up()


def behind_service(rollout: RolloutConfig) -> RolloutConfig:
    """Return the configuration with a later deadline, for an engine behind a service.

    The service must reach its deadline first: it aborts and so keeps what was sampled.
    """
    return rollout.model_copy(update={"timeout_s": rollout.timeout_s + BEHIND_SERVICE_S})


def create_rollout_engine(
    name: str,
    hf_dir: Path,
    rollout: RolloutConfig,
    dtype: str,
    platform: PlatformBase,
    adapter: LoraConfig | None = None,
) -> RolloutEngine:
    """Build the named rollout engine. It serves nothing before its first weight update.

    An adapter shape is only for engines with `ADAPTERS`; None: there is no adapter.

    Raises:
        ConfigError: unknown or ambiguous name, or the engine refuses the model or the options.
    """
    row = ROLLOUT_ENGINES.find(name)
    check_options(rollout.options, [row], "rollout.options")
    make = load_row(row, ROLLOUT_ENGINES.setting)
    return make(hf_dir, rollout, dtype, platform, **({"adapter": adapter} if adapter else {}))
