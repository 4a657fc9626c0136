"""A sample in the processes of an engine's library, and what follows and finishes it.

Promises: a completion has one logprob and one version per token; a sample with stop strings ends at
the first one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engines.errors import RolloutError
from engines.rollout.stop_strings import SampledText
from engines.types import Completion, RolloutRequest


@dataclass(eq=False)
class RunningSample:
    """One sample in the engine's processes.

    Attributes:
        place: index of its seed in the request.
        name: its name in the processes; unique, and not a prefix of another sample's name.
        call: number of its `generate` call.
        aborted: an abort was requested.
    """

    request: RolloutRequest
    place: int
    name: str
    call: int
    text: SampledText | None = None
    aborted: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Request id and sample index."""
        return self.request.request_id, self.request.sample_index(self.place)

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

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Iterable[tuple[int, int, int]],
        finish_reason: str,
        num_until_stop: int | None,
    ) -> Completion:
        """Return the completion, cut behind the token that completes a stop string.

        Args:
            spans: policy version of the tokens from a start to an end.
            num_until_stop: number of tokens up to the stop string; None: there is none.

        Raises:
            RolloutError: a token lacks its logprob or its version.
        """
        versions = [version for version, start, end in spans for _ in range(start, end)]
        if not len(token_ids) == len(logprobs) == len(versions):
            raise RolloutError(
                f"{self.name}: {len(token_ids)} tokens with {len(logprobs)} logprobs and "
                f"{len(versions)} versions"
            )
        kept = slice(num_until_stop)
        reason = finish_reason if num_until_stop is None else "stop"
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


async def follow(
    text: SampledText,
    answers: AsyncIterator[Any],
    read: Callable[[Any], tuple[Sequence[int], bool]],
    end: Callable[[], Awaitable[object]],
) -> tuple[Any, int | None]:
    """Follow a sample step by step, and have it ended at its first stop string.

    The stop strings of the libraries ignore a prefix.

    Args:
        read: returns all token ids of an answer so far, and whether the sample has ended.
        end: ends the sample; its last answer is still awaited.

    Returns:
        The last answer (None: there was none), and its number of tokens up to the stop string.
    """
    answer: Any = None
    num_seen, num_until_stop = 0, None
    async for answer in answers:
        token_ids, has_ended = read(answer)
        if num_until_stop is None:
            number = text.contains_stop(token_ids[num_seen:])
            if number is not None:
                num_until_stop = num_seen + number
                if not has_ended:
                    await end()
        num_seen = len(token_ids)
    return answer, num_until_stop
