"""Checks that every rollout engine makes on a request before it samples."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from engines.config.plugins import IMAGES, STRUCTURED_OUTPUT, engines_with
from engines.errors import RolloutError
from engines.types import RolloutRequest


def check_requests(
    requests: Sequence[RolloutRequest],
    in_flight: Iterable[tuple[str, int]],
    context_length: int,
    vocab_size: int,
    *,
    structured_output: bool = False,
    images: bool = False,
) -> None:
    """Refuse invalid requests, and samples requested twice or in flight, with a RolloutError.

    The error names request and problem. The context length is the limit of prompt and response
    together, in tokens.
    """
    taken = set(in_flight)
    for request in requests:
        for problem in _problems(request, context_length, vocab_size, structured_output, images):
            raise RolloutError(f"{request.request_id}: {problem}")
        for key in request.sample_keys:
            if key in taken:
                raise RolloutError(
                    f"{request.request_id}: sample {key[1]} is requested twice, or is in flight"
                )
            taken.add(key)


def _problems(
    request: RolloutRequest,
    context_length: int,
    vocab_size: int,
    structured_output: bool,
    images: bool,
) -> Iterator[str]:
    sampling, num_prompt = request.sampling, len(request.prompt_ids)
    limit = sampling.max_new_tokens
    if not num_prompt:
        yield "the prompt is empty; need at least one token"
    if not _in_vocabulary(request.prompt_ids, vocab_size):
        yield f"a prompt token is outside the vocabulary of {vocab_size}"
    if limit < 1:
        yield f"max_new_tokens is {limit}; need at least 1"
    if num_prompt + limit > context_length:
        yield (
            f"{num_prompt} prompt tokens and max_new_tokens {limit} do not fit the context of "
            f"{context_length}"
        )
    yield from _problems_of_samples(request, vocab_size)
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        yield f"temperature is {sampling.temperature}; need a number of at least 0"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p is {sampling.top_p}; need more than 0 and at most 1"
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}; need at least 0, which switches it off"
    if "" in sampling.stop or _repeats(sampling.stop):
        yield f"stop is {sampling.stop}; need texts that are not empty, each once"
    if not _in_vocabulary(sampling.stop_token_ids, vocab_size) or _repeats(sampling.stop_token_ids):
        yield (
            f"stop_token_ids are {sampling.stop_token_ids}; need ids below the vocabulary of "
            f"{vocab_size}, each once"
        )
    if sampling.structured_output and not structured_output:
        able = ", ".join(engines_with(STRUCTURED_OUTPUT)) or "none"
        yield f"this rollout engine has no structured output; engines that have it: {able}"
    if request.images and not images:
        yield (
            f"got {len(request.images)} images; engine or model takes none; engines that "
            f"pass images to a model that takes them: {', '.join(engines_with(IMAGES)) or 'none'}"
        )


def _problems_of_samples(request: RolloutRequest, vocab_size: int) -> Iterator[str]:
    if not request.seeds:
        yield "no seeds; need one per sample"
    for name in ("prefixes", "draw_offsets", "sample_indices"):
        num_given = len(getattr(request, name))
        if num_given not in (0, request.num_samples):
            yield f"{num_given} {name} for {request.num_samples} seeds; need one each, or none"
    for prefix in request.prefixes:
        if not _in_vocabulary(prefix, vocab_size):
            yield f"a token of a prefix is outside the vocabulary of {vocab_size}"
        if len(prefix) >= request.sampling.max_new_tokens:
            yield (
                f"a prefix has {len(prefix)} tokens; need fewer than max_new_tokens "
                f"{request.sampling.max_new_tokens}, or there is nothing left to sample"
            )
    if request.sampling.structured_output and any(request.prefixes):
        yield "structured output cannot continue a prefix; ask for the whole sample again"
    if min(request.draw_offsets, default=0) < 0:
        yield f"a draw offset is {min(request.draw_offsets)}; need at least 0"
    if min(request.sample_indices, default=0) < 0 or _repeats(request.sample_indices):
        yield f"sample_indices are {request.sample_indices}; need numbers from 0 on, each once"
    if request.turn < 0:
        yield f"turn is {request.turn}; need at least 0"


def _in_vocabulary(token_ids: Collection[int], vocab_size: int) -> bool:
    return all(0 <= token < vocab_size for token in token_ids)


def _repeats(values: Collection[object]) -> bool:
    return len(set(values)) < len(values)
