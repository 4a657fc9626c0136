"""The contract of a rollout engine: prompts in as token ids, completions out as they finish.

Promises of every engine: each sample depends only on (weights, prompt, prefix, sampling params,
its own seed and draw offset), never on what else is in flight; reported logprobs are those of the
sampling distribution; every token carries the version of the weights that sampled it; no token
is sampled from weights that were not confirmed by `finish_update`; a sample that continues a
prefix uses no random number that its prefix may have used; the samples of a call advance together,
as far as there is room.
Not promised: the order of completions; that a continued sample has the very tokens of an
uninterrupted one, unless the engine has the capability. The engine knows nothing of rewards or
training, and of text only the stop strings.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

from engines.errors import RolloutError, WeightSyncError
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import Receipt, WeightSource

SleepLevel = Literal["kv", "weights"]
NEED_IDLE = frozenset({"update_weights", "update_adapter", "sleep"})
"""Calls of an engine before which its caller ends what is in flight."""


class Capability(Enum):
    """What an engine may be able to do beyond the contract; `rlhf engines` tells it."""

    PREFIX_CACHE = "prefix_cache"
    """Keeps keys and values of prompts between requests: a sync has to forget them."""
    SLEEP_FREES_MEMORY = "sleep_frees_memory"
    """`sleep` gives memory back; otherwise it only refuses to sample."""
    STRUCTURED_OUTPUT = "structured_output"
    """Samples of a given form: `SamplingParams.structured_output`. In the engine's row, too."""
    EXACT_CONTINUATION = "exact_continuation"
    """A sample that continues a prefix has the tokens that it would have had uninterrupted."""
    SHARED_MEMORY = "shared_memory"
    """Takes its weights in processes of its own: the source must be readable there."""
    ADAPTERS = "adapters"
    """Takes an adapter beside the weights it stands on; such an engine is made with its shape."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Says what is likely in each place of a given sequence of text: it can serve a teacher."""
    PROMPT_LOGPROBS_AT_ANY_TEMPERATURE = "prompt_logprobs_at_any_temperature"
    """Says that at other temperatures than 1, too."""
    IMAGES = "images"
    """Shows a model that sees the images of a request: `RolloutRequest.images`. In the engine's
    row, too."""


@dataclass(frozen=True)
class Health:
    """What an engine says of itself, also while it generates.

    Attributes:
        can_serve: whether a request would be sampled now.
        version: of the weights it serves; -1 for none.
        num_running: samples in flight.
    """

    can_serve: bool
    version: int
    num_running: int


class RolloutEngine(ABC):
    """One rollout engine on one worker. All calls come from one and the same asyncio loop."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    num_workers: int = 1
    """Processes that share the model; each reads all weights: `WeightSource.of_worker`."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights being served; -1 before the first update."""

    @abstractmethod
    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """Sample every request; yield each completion as soon as it is finished.

        Args:
            requests: what to sample; no sample, by request id and sample index, may be among
                them twice or in flight already. Once its call has ended, for whatever reason, it
                may be asked for again, and nothing of the earlier call comes out.

        Returns:
            The completions, one per sample.

        Raises:
            RolloutError: before the first confirmed weight update, when a prompt leaves no room
                for `max_new_tokens` in the context, or when the request asks for what the engine
                cannot do.
            DeadlineError: samples are unfinished after `rollout.timeout_s`.
        """

    @abstractmethod
    async def update_weights(self, source: WeightSource, version: int) -> Receipt:
        """Take new weights by Hugging Face name, to be served as `version`.

        Streams: holds at most one incoming tensor at a time beside its own copy. Requests in
        flight must have been drained, paused or aborted by the caller. From the first tensor
        until `finish_update` the engine refuses to sample, also after an error.

        Args:
            source: every parameter and persistent buffer, each in the dtype it is held in.
            version: number of the weights, 0 or more.

        Returns:
            What the engine now holds, for the sender to compare with what it sent.

        Raises:
            WeightSyncError: a name is unknown, missing, repeated, or has another shape or dtype.
        """

    async def update_adapter(self, source: WeightSource, version: int) -> Receipt:
        """Take a new adapter of the weights of the last `update_weights`, as that does.

        Args:
            source: `lora_A.weight` (rank, in) and `lora_B.weight` (out, rank) under the name of
                each module; one worker reads it.
            version: number of the weights and the adapter together, 0 or more.

        Returns:
            As `update_weights`, of the adapter; its digest is what `finish_update` confirms.

        Raises:
            WeightSyncError: as `update_weights`; or the engine holds no weights, or takes no
                adapters.
        """
        raise WeightSyncError(f"{type(self).__name__} was not made for an adapter")

    @abstractmethod
    async def finish_update(self, version: int, digest: str) -> None:
        """Confirm the last `update_weights`: from now on tokens are sampled from `version`.

        Args:
            version: the version given to `update_weights`.
            digest: digest of the weights as the sender computed it.

        Raises:
            WeightSyncError: no such update is pending, or the digest is not the engine's own;
                the engine goes on refusing.
        """

    @abstractmethod
    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Logprobs of given tokens under the weights that are served: the probe after a sync.

        Args:
            sequences: token ids, at least two each.
            temperature: of the distribution, above 0.

        Returns:
            For each sequence the logprob of every token but its first.

        Raises:
            RolloutError: no confirmed weights.
        """

    async def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """Logprobs of given tokens, and the likeliest tokens in their places.

        For engines with the capability `PROMPT_LOGPROBS`. Never holds the logits of all tokens of
        a call, nor answers with more than what was asked for.

        Args:
            requests: with ids that differ.

        Returns:
            One answer each, in their order.

        Raises:
            RolloutError: no confirmed weights, a request that cannot be answered (see
                `check_prompts`), or the engine lacks the capability.
            DeadlineError: an answer took longer than `rollout.timeout_s`.
        """
        raise RolloutError(f"{type(self).__name__} says no logprobs of a prompt")

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling between two tokens; requests in flight keep their state."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests now (None: all); their partial samples come out as `abort`.

        A call of `NEED_IDLE` may follow at once, also before anyone took what comes out.
        """

    @abstractmethod
    async def sleep(self, level: SleepLevel = "weights") -> None:
        """Give device memory back; what is in flight must have been drained or aborted.

        Args:
            level: `kv` the cache only, serving goes on after `wake_up`; `weights` everything,
                they must be updated again after `wake_up`.
        """

    @abstractmethod
    async def wake_up(self) -> None:
        """Undo `sleep`."""

    @abstractmethod
    async def health(self) -> Health:
        """What the engine says of itself."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; the engine is of no use afterwards."""
