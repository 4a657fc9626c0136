"""A sample in the processes of an engine's library, and its way to a completion.

Promises: a completion has one logprob and one version per token; a sample with stop strings ends at
the first one. The stop strings of the libraries are not used, since they ignore a prefix.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.errors import RolloutError
from engines.rollout.engine_state import SampleOfCall
from engines.rollout.stop_strings import SampledText
from engines.types import Completion


@dataclass(eq=False, slots=True)
class RunningSample(SampleOfCall):
    """One sample in the engine's processes.

    Attributes:
        name: its name in the processes; unique, and not a prefix of another sample's name.
        aborted: an abort was requested.
        num_until_stop: number of sampled tokens up to the first stop string; None: none was found.
    """

    name: str
    text: SampledText | None = None
    aborted: bool = False
    num_until_stop: int | None = None
    _num_seen: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt and prefix, which the processes take as its prompt."""
        return [*self.request.prompt_ids, *self.request.prefix(self.place)]

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.request.sampling.max_new_tokens - len(self.request.prefix(self.place))

    def empty(self) -> Completion:
        """Return the completion of a sample aborted before its first token."""
        return Completion(*self.key, (), (), (), "abort")

    def reaches_stop(self, token_ids: Sequence[int]) -> bool:
        """Return True if these are the first sampled tokens so far that contain a stop string."""
        if self.text is None or self.num_until_stop is not None:
            return False
        number = self.text.contains_stop(token_ids[self._num_seen :])
        if number is not None:
            self.num_until_stop = self._num_seen + number
        self._num_seen = len(token_ids)
        return number is not None

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Iterable[tuple[int, int, int]],
        finish_reason: str,
    ) -> Completion:
        """Return the completion, cut after the token that completes a stop string.

        Args:
            spans: policy version of the tokens from a start to an end.

        Raises:
            RolloutError: a token lacks its logprob or its version.
        """
        versions = [version for version, start, end in spans for _ in range(start, end)]
        if not len(token_ids) == len(logprobs) == len(versions):
            raise RolloutError(
                f"{self.name}: {len(token_ids)} tokens with {len(logprobs)} logprobs and "
                f"{len(versions)} versions"
            )
        kept = slice(self.num_until_stop)
        reason = finish_reason if self.num_until_stop is None else "stop"
        return Completion(*self.key, token_ids[kept], logprobs[kept], versions[kept], reason)


class Sampler(Protocol):
    """Computes samples with the engine's library."""

    @property
    def is_lost(self) -> bool:
        """True if the processes are gone."""
        ...

    async def sample(self, sample: RunningSample) -> Completion:
        """Sample to the end; when cancelled, have the processes drop the sample.

        The processes must know the sample before this coroutine first yields, else it must check
        `RunningSample.aborted` once they do: an abort reaches only known samples.
        """
        ...
