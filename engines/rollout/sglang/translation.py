"""Translates requests, seeds and completions between this project and SGLang.

Promises: the requested distribution is sampled, or the request is refused; every token has a
logprob and a version. A sample starts in its seed's stream where its prefix or draw offset says, so
a continued sample equals an uninterrupted one up to rounding.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.served.sampler import RunningSample
from engines.rollout.transformers.scheduler import GAMMA, stream_starts
from engines.types import Completion, RolloutRequest, StructuredOutput

MIN_TEMPERATURE = 1e-5
"""SGLang treats a smaller temperature as 0."""
OFF = -1


def check_temperature(request: RolloutRequest) -> None:
    """Refuse a temperature that SGLang would silently change."""
    temperature = request.sampling.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise RolloutError(
            f"{request.request_id}: temperature is {temperature}; SGLang takes it for 0; use 0, or "
            f"{MIN_TEMPERATURE} and more"
        )


def stream_start(sample: RunningSample) -> int:
    """Return the int64 stream start that gives a sample its next number at its next position.

    SGLang counts positions of prompt and prefix from 0, the stream counts draws.
    """
    request, place = sample.request, sample.place
    start = int(stream_starts([request.seeds[place]]))
    num_behind = request.draw_offset(place) - (len(sample.token_ids) - 1)
    return (start + num_behind * GAMMA + 2**63) % 2**64 - 2**63


def batch_body(samples: Sequence[RunningSample], eos_token_ids: Collection[int]) -> dict[str, Any]:
    """Return the request body for samples: token ids and logprobs, as a stream of answers.

    Each sample is answered at its end; one with stop strings after each step.
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
    """Return the request body for the logprobs of given tokens.

    SGLang computes them at temperature 1; for others those of the whole vocabulary are requested
    and rescaled by `scores`.
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
    """Return the request body for prompt logprobs, answered after position `logprob_start_len`."""
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
    """Convert SGLang's last answer, up to the `num_until_stop` tokens that complete a stop string.

    Raises:
        RolloutError: a token lacks its logprob or version, or SGLang ended it for its own reasons.
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
    # SGLang does not distinguish top-k 1 from temperature 0; with top-k 1 the logprob is 0.
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
    """Return why the sample ended; raise a RolloutError for a reason that we did not cause."""
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
