"""A sample in an engine's own processes, and the interface of what computes it there."""

from dataclasses import dataclass
from typing import Protocol

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
