"""Between this project's requests and SGLang's: seeds, sampling parameters, completions.

Promises: the distribution that is sampled is the one that was asked for, or the request is
refused; logprobs and policy versions come out one per token; a sample draws from the stream of
its seed where its prefix or its draw offset says, so a continued sample has the tokens of an
uninterrupted one as far as rounding allows.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.served.in_flight import RunningSample
from engines.rollout.transformers.sampling import GAMMA, stream_starts
from engines.types import Completion, RolloutRequest, StructuredOutput

MIN_TEMPERATURE = 1e-5
"""SGLang takes a smaller one for 0."""
OFF = -1


def check_temperature(request: RolloutRequest) -> None:
    """Refuse a temperature that SGLang would change in silence."""
    temperature = request.sampling.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise RolloutError(
            f"{request.request_id}: temperature is {temperature}; SGLang takes it for 0; use 0, or "
            f"{MIN_TEMPERATURE} and more"
        )


def stream_start(sample: RunningSample) -> int:
    """Where the stream of a sample would have begun to reach its next number behind its prompt.

    SGLang counts positions, of prompt and prefix and from 0, and we draws. Both count up by 1.

    Args:
        sample: the sample.

    Returns:
        A signed number of 64 bits: its seed, for `engines.rollout.sglang.plugin`.
    """
    request, place = sample.request, sample.place
    start = int(stream_starts([request.seeds[place]]))
    num_behind = request.draw_offset(place) - (len(sample.token_ids) - 1)
    return (start + num_behind * GAMMA + 2**63) % 2**64 - 2**63


def batch_body(samples: Sequence[RunningSample], eos_token_ids: Collection[int]) -> dict[str, Any]:
    """What SGLang is asked for samples: token ids and their logprobs, as a stream of answers.

    Args:
        samples: each comes at its end; one with stop strings after each step, for we look for them.
        eos_token_ids: what ends one, beside its own stop tokens.

    Returns:
        For JSON.
    """
    return {
        "rid": [sample.name for sample in samples],
        "input_ids": [sample.token_ids for sample in samples],
        "return_logprob": True,
        "logprob_start_len": OFF,
        "stream": True,
        "sampling_params": [_sampling(sample, eos_token_ids) for sample in samples],
    }


def _sampling(sample: RunningSample, eos_token_ids: Collection[int]) -> dict[str, Any]:
    sampling = sample.request.sampling
    return {
        "max_new_tokens": sample.num_left,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or OFF,
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": stream_start(sample),
        "stream_interval": sample.num_left + 1 if sample.text is None else 1,
        **_form(sampling.structured_output),
    }


def _form(form: StructuredOutput | None) -> dict[str, str]:
    if form is None:
        return {}
    if form.json_schema:
        return {"json_schema": form.json_schema}
    return {"regex": form.regex or "|".join(f"({re.escape(each)})" for each in form.choice)}


def score_body(ids: Sequence[int], temperature: float, vocab_size: int) -> dict[str, Any]:
    """What SGLang is asked for the logprobs of given tokens.

    They come out at temperature 1. For another one those of the whole vocabulary are asked for,
    to be scaled by `scores`.

    Args:
        ids: token ids, at least two.
        temperature: of the distribution.
        vocab_size: of the model.

    Returns:
        For JSON.
    """
    wanted = {} if temperature == 1 else {"token_ids_logprob": list(range(vocab_size))}
    return {
        "input_ids": list(ids),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        **wanted,
    }


def prompt_body(request: PromptRequest, num_top: int) -> dict[str, Any]:
    """What SGLang is asked for what is likely in the places of given tokens.

    Args:
        request: at temperature 1.
        num_top: likeliest tokens of each place; 0: none.

    Returns:
        For JSON. SGLang tells of the places behind the first that it is to look at.
    """
    return {
        "input_ids": list(request.token_ids),
        "return_logprob": True,
        "logprob_start_len": request.first - 1,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        **({"top_logprobs_num": num_top} if num_top else {}),
    }


def completion(
    sample: RunningSample,
    answer: Mapping[str, Any],
    eos_token_ids: Collection[int],
    num_until_stop: int | None = None,
) -> Completion:
    """What SGLang's last answer about a sample says.

    Args:
        sample: the sample.
        answer: with `output_ids` and `meta_info`.
        eos_token_ids: as in `batch_body`.
        num_until_stop: tokens up to the one that completed a stop string; None: none did.

    Returns:
        The completion.

    Raises:
        RolloutError: a token lacks its logprob or its version, or SGLang ended it for a reason of
            its own.
    """
    meta, sampling = answer["meta_info"], sample.request.sampling
    token_ids = tuple(answer["output_ids"])
    rows = meta.get("output_token_logprobs") or []
    versions: list[str] = []
    for span in meta.get("weight_versions") or []:
        versions += [span["version"]] * (span["end"] - span["start"])
    if not len(rows) == len(versions) == len(token_ids):
        raise RolloutError(
            f"{sample.name}: {len(token_ids)} tokens with {len(rows)} logprobs and "
            f"{len(versions)} versions"
        )
    if num_until_stop is None:
        reason = _reason(sample, token_ids, meta["finish_reason"], eos_token_ids)
    else:
        reason = "stop"
    # SGLang has one setting for the largest token alone and for temperature 0.
    certain = sampling.top_k == 1 and sampling.temperature > 0
    logprobs = tuple(0.0 if certain else row[0] for row in rows)
    kept = slice(num_until_stop)
    numbers = [int(version) for version in versions[kept]]
    return Completion(*sample.key, token_ids[kept], logprobs[kept], numbers, reason)


def _reason(
    sample: RunningSample,
    token_ids: Sequence[int],
    said: Mapping[str, Any],
    eos_token_ids: Collection[int],
) -> str:
    """Why it ended; a RolloutError unless it is a reason that we gave."""
    reason = said["type"]
    ends = {*eos_token_ids, *sample.request.sampling.stop_token_ids}
    is_ours = {
        "abort": sample.aborted,
        "length": len(token_ids) == sample.num_left,
        "stop": bool(token_ids) and token_ids[-1] in ends,
    }
    if not is_ours.get(reason, False):
        raise RolloutError(
            f"{sample.name}: SGLang ended it after {len(token_ids)} tokens: {json.dumps(said)}"
        )
    return reason
