"""What every rollout engine refuses in a request before it samples; one place, one wording."""

import math

from engines.errors import RolloutError
from engines.types import RolloutRequest


def check_request(request: RolloutRequest, context_length: int, vocab_size: int) -> None:
    """Refuse a request that cannot be served as it stands.

    Args:
        request: the request.
        context_length: tokens that prompt and response may have together.
        vocab_size: token ids are below this.

    Raises:
        RolloutError: names the request and what is wrong.
    """
    sampling = request.sampling
    problem = None
    if not request.prompt_ids:
        problem = "the prompt is empty; need at least one token"
    elif min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        problem = f"a prompt token is outside the vocabulary of {vocab_size}"
    elif not request.seeds:
        problem = "no seeds; need one per sample"
    elif sampling.max_new_tokens < 1:
        problem = f"max_new_tokens is {sampling.max_new_tokens}; need at least 1"
    elif len(request.prompt_ids) + sampling.max_new_tokens > context_length:
        problem = (
            f"{len(request.prompt_ids)} prompt tokens and max_new_tokens "
            f"{sampling.max_new_tokens} do not fit the context of {context_length}"
        )
    elif not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        problem = f"temperature is {sampling.temperature}; need a number of at least 0"
    elif not 0 < sampling.top_p <= 1:
        problem = f"top_p is {sampling.top_p}; need more than 0 and at most 1"
    elif sampling.top_k < 0:
        problem = f"top_k is {sampling.top_k}; need at least 0, which switches it off"
    if problem:
        raise RolloutError(f"{request.request_id}: {problem}")
