"""The contract of a rollout engine: prompts in as token ids, completions out as they finish.

Promises of every engine: each sample depends only on (weights, prompt, sampling params, its own
seed), never on what else is in flight; reported logprobs are those of the sampling
distribution; every token carries the version of the weights that sampled it; no token is
sampled from weights that were not confirmed by `finish_update`.
Not promised: the order of completions. The engine knows nothing of text, rewards or training.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence

from torch import Tensor

from engines.types import Completion, RolloutRequest


class RolloutEngine(ABC):
    """One rollout engine on one worker. Calls come from a single asyncio loop."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights being served; -1 before the first update."""

    @abstractmethod
    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """Sample every request; yield each completion as soon as it is finished.

        Args:
            requests: what to sample; ids must differ from each other and from those in flight.

        Returns:
            The completions, one per sample.

        Raises:
            RolloutError: before the first confirmed weight update, or when a prompt leaves no
                room for `max_new_tokens` in the context.
            DeadlineError: samples are unfinished after `rollout.timeout_s`.
        """

    @abstractmethod
    async def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> str:
        """Take new weights by Hugging Face name, to be served as `version`.

        Streams: holds at most one incoming tensor at a time beside its own copy. Requests in
        flight must have been drained, paused or aborted by the caller. From the first tensor
        until `finish_update` the engine refuses to sample, also after an error.

        Args:
            tensors: (name, full tensor) of every parameter, tied ones once, in the engine's dtype.
            version: number of the weights, 0 or more.

        Returns:
            The digest of the weights as the engine now holds them
            (`engines.checksum.combine`), for the sender to compare with its own.

        Raises:
            WeightSyncError: a name is unknown, missing, repeated, or has another shape.
        """

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
    async def pause(self) -> None:
        """Stop sampling between two tokens; requests in flight keep their state."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests now (None: all); their partial samples come out as `abort`."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free device memory; weights must be updated again after `wake_up`."""

    @abstractmethod
    async def wake_up(self) -> None:
        """Undo `sleep`."""

    @abstractmethod
    async def health(self) -> bool:
        """Whether the engine can serve now."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; the engine is of no use afterwards."""
