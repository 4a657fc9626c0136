"""Every way a request can be wrong, one line each."""

from dataclasses import replace

import pytest

from engines.errors import RolloutError
from engines.rollout.request_check import check_request
from engines.types import RolloutRequest, SamplingParams

GOOD = RolloutRequest("r=1", (1, 2, 3), SamplingParams(5, 0.0, 1.0, 0), (7,))


def with_sampling(**changes) -> RolloutRequest:
    return replace(GOOD, sampling=replace(GOOD.sampling, **changes))


def test_a_request_that_just_fits_is_accepted():
    check_request(GOOD, context_length=8, vocab_size=4)


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (replace(GOOD, prompt_ids=()), "prompt is empty"),
        (replace(GOOD, prompt_ids=(1, 4)), "outside the vocabulary of 4"),
        (replace(GOOD, prompt_ids=(-1,)), "outside the vocabulary of 4"),
        (replace(GOOD, seeds=()), "no seeds"),
        (with_sampling(max_new_tokens=0), "max_new_tokens is 0"),
        (with_sampling(max_new_tokens=6), "3 prompt tokens and max_new_tokens 6 do not fit .* 8"),
        (with_sampling(temperature=-0.1), "temperature is -0.1"),
        (with_sampling(temperature=float("nan")), "temperature is nan"),
        (with_sampling(temperature=float("inf")), "temperature is inf"),
        (with_sampling(top_p=0.0), "top_p is 0.0"),
        (with_sampling(top_p=1.5), "top_p is 1.5"),
        (with_sampling(top_k=-1), "top_k is -1"),
    ],
)
def test_what_is_wrong_is_named(request_, what):
    with pytest.raises(RolloutError, match=f"r=1: .*{what}"):
        check_request(request_, context_length=8, vocab_size=4)
