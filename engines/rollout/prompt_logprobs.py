"""What a model says of tokens that are given to it: what a served teacher is asked.

Engines and the field call it prompt logprobs: a sequence is read as a prompt and nothing is
sampled. Plain data, and what every engine refuses of it before it computes; one place, one wording.
Letters: N tokens that are asked about, K likeliest tokens of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.errors import RolloutError


@dataclass(frozen=True)
class PromptRequest:
    """One sequence, and what is asked about its tokens.

    Attributes:
        request_id: no other request of a call has it.
        token_ids: of the sequence, at least two.
        first: place of the first token that is asked about; of those before it nothing is said.
        temperature: of the distributions, above 0; one other than 1 is for engines with that
            capability.
        num_top: K; 0 asks for none.
        below: only tokens with a lower id are among the K; None: any. All have part in the
            distribution.
    """

    request_id: str
    token_ids: tuple[int, ...]
    first: int = 1
    temperature: float = 1.0
    num_top: int = 0
    below: int | None = None

    @property
    def num_samples(self) -> int:
        """One sequence: what `engines.rollout.routing` counts."""
        return 1

    @property
    def session(self) -> str | None:
        """None: any replica may read it."""
        return None


@dataclass(frozen=True)
class PromptLogprobs:
    """The answer, in the order of the tokens from `PromptRequest.first` on; on the CPU.

    Attributes:
        request_id: of the request.
        logprobs_N: (N,) float32, of each token that stands there.
        topk_ids_NK: (N, K) int64, the likeliest tokens in its place, distinct, the likeliest
            first; None where none were asked for.
        topk_logprobs_NK: (N, K) float32, theirs.
    """

    request_id: str
    logprobs_N: Tensor
    topk_ids_NK: Tensor | None = None
    topk_logprobs_NK: Tensor | None = None


def check_prompts(
    requests: Sequence[PromptRequest], max_length: int, vocab_size: int, *, any_temperature: bool
) -> None:
    """Refuse requests that cannot be answered as they stand.

    Args:
        requests: of one call.
        max_length: tokens of the longest sequence.
        vocab_size: token ids are below this.
        any_temperature: whether the engine has the capability of others than 1.

    Raises:
        RolloutError: names the request and what is wrong.
    """
    for request in requests:
        problem = _problem(request, max_length, vocab_size)
        if problem is None and request.temperature != 1 and not any_temperature:
            problem = f"temperature is {request.temperature}; this rollout engine knows 1 alone"
        if problem is not None:
            raise RolloutError(f"{request.request_id}: {problem}")
    if len({request.request_id for request in requests}) != len(requests):
        raise RolloutError("two requests of one call have the same id")


def _problem(request: PromptRequest, max_length: int, vocab_size: int) -> str | None:
    ids, length = request.token_ids, len(request.token_ids)
    if not 2 <= length <= max_length:
        return f"a sequence of {length} tokens; need 2 to {max_length}"
    if not 1 <= request.first < length:
        return f"first is {request.first}; need 1 to {length - 1}"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"a token is outside the vocabulary of {vocab_size}"
    if not 0 < request.temperature < float("inf"):
        return f"temperature is {request.temperature}; need a number above 0"
    most = vocab_size if request.below is None else min(request.below, vocab_size)
    if not 0 <= request.num_top <= most:
        return f"num_top is {request.num_top}; need 0 to {most}"
    return None
