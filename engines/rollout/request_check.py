"""Checks that every rollout engine makes on a request before it samples."""

import math
from collections.abc import Collection, Iterable, Sequence

from engines.config.plugins import IMAGES, engines_with, structured_output_engines
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

    The context length is the limit of prompt and response together, in tokens.
    """
    taken = set(in_flight)
    for request in requests:
        check_request(
            request,
            context_length,
            vocab_size,
            structured_output=structured_output,
            images=images,
        )
        for key in request.sample_keys:
            if key in taken:
                raise RolloutError(
                    f"{request.request_id}: a request of that id is in flight with sample {key[1]}"
                )
            taken.add(key)


def check_request(
    request: RolloutRequest,
    context_length: int,
    vocab_size: int,
    *,
    structured_output: bool = False,
    images: bool = False,
) -> None:
    """Refuse an invalid request with a RolloutError that names the request and the problem."""
    problem = (
        _wrong_with_prompt(request, context_length, vocab_size)
        or _wrong_with_samples(request, vocab_size)
        or _wrong_with_distribution(request)
        or _wrong_with_ends(request, vocab_size)
    )
    if not problem and request.sampling.structured_output and not structured_output:
        able = ", ".join(structured_output_engines()) or "none"
        problem = f"this rollout engine has no structured output; engines that have it: {able}"
    if not problem and request.images and not images:
        able = ", ".join(engines_with(IMAGES)) or "none"
        problem = (
            f"{len(request.images)} images, of which this engine and its model see none; engines "
            f"that show images to a model that sees: {able}"
        )
    if problem:
        raise RolloutError(f"{request.request_id}: {problem}")


def _wrong_with_prompt(request: RolloutRequest, context_length: int, vocab_size: int) -> str | None:
    limit = request.sampling.max_new_tokens
    if not request.prompt_ids:
        return "the prompt is empty; need at least one token"
    if not _in_vocabulary(request.prompt_ids, vocab_size):
        return f"a prompt token is outside the vocabulary of {vocab_size}"
    if limit < 1:
        return f"max_new_tokens is {limit}; need at least 1"
    if len(request.prompt_ids) + limit > context_length:
        return (
            f"{len(request.prompt_ids)} prompt tokens and max_new_tokens {limit} do not fit the "
            f"context of {context_length}"
        )
    return None


def _wrong_with_samples(request: RolloutRequest, vocab_size: int) -> str | None:
    if not request.seeds:
        return "no seeds; need one per sample"
    for name in ("prefixes", "draw_offsets", "sample_indices"):
        num_given = len(getattr(request, name))
        if num_given not in (0, request.num_samples):
            return f"{num_given} {name} for {request.num_samples} seeds; need one each, or none"
    for prefix in request.prefixes:
        if not _in_vocabulary(prefix, vocab_size):
            return f"a token of a prefix is outside the vocabulary of {vocab_size}"
        if len(prefix) >= request.sampling.max_new_tokens:
            return (
                f"a prefix has {len(prefix)} tokens; need fewer than max_new_tokens "
                f"{request.sampling.max_new_tokens}, or there is nothing left to sample"
            )
    if min(request.draw_offsets, default=0) < 0:
        return f"a draw offset is {min(request.draw_offsets)}; need at least 0"
    if min(request.sample_indices, default=0) < 0 or _repeats(request.sample_indices):
        return f"sample_indices are {request.sample_indices}; need numbers from 0 on, each once"
    if request.turn < 0:
        return f"turn is {request.turn}; need at least 0"
    return None


def _wrong_with_distribution(request: RolloutRequest) -> str | None:
    sampling = request.sampling
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}; need a number of at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; need more than 0 and at most 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; need at least 0, which switches it off"
    if sampling.structured_output and any(request.prefixes):
        return "structured output cannot continue a prefix; ask for the whole sample again"
    return None


def _wrong_with_ends(request: RolloutRequest, vocab_size: int) -> str | None:
    sampling = request.sampling
    if "" in sampling.stop or _repeats(sampling.stop):
        return f"stop is {sampling.stop}; need texts that are not empty, each once"
    if not _in_vocabulary(sampling.stop_token_ids, vocab_size) or _repeats(sampling.stop_token_ids):
        return (
            f"stop_token_ids are {sampling.stop_token_ids}; need ids below the vocabulary of "
            f"{vocab_size}, each once"
        )
    return None


def _in_vocabulary(token_ids: Collection[int], vocab_size: int) -> bool:
    return all(0 <= token < vocab_size for token in token_ids)


def _repeats(values: Collection[object]) -> bool:
    return len(set(values)) < len(values)
