"""Every way a request can be wrong, one line each."""

from dataclasses import replace

import pytest

from engines.errors import RolloutError
from engines.rollout.request_check import check_requests
from engines.types import RolloutRequest, SamplingParams, StructuredOutput

FORM = StructuredOutput(choice=("a", "b"))
GOOD = RolloutRequest("r=1", (1, 2, 3), SamplingParams(5, 0.0, 1.0, 0), (7,))


def with_sampling(**changes) -> RolloutRequest:
    return replace(GOOD, sampling=replace(GOOD.sampling, **changes))


def test_a_request_that_just_fits_is_accepted():
    check_requests([GOOD], [], context_length=8, vocab_size=4)
    rest = replace(GOOD, prefixes=((1, 2, 3, 0),), draw_offsets=(9,), sample_indices=(7,), turn=3)
    check_requests([rest], [], context_length=8, vocab_size=4)
    ends = with_sampling(stop=("a", "b"), stop_token_ids=(0, 3), structured_output=FORM)
    check_requests([ends], [], context_length=8, vocab_size=4, structured_output=True)


def test_a_form_cannot_be_kept_from_the_middle_on():
    rest = replace(with_sampling(structured_output=FORM), prefixes=((1,),))
    with pytest.raises(RolloutError, match="cannot continue a prefix"):
        check_requests([rest], [], 8, 4, structured_output=True)
    check_requests([replace(rest, prefixes=((),))], [], 8, 4, structured_output=True)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"regex": "a", "choice": ("a",)}, {"json_schema": ""}],
    ids=str,
)
def test_a_form_is_one_of_three(wrong):
    with pytest.raises(ValueError, match="need one of json_schema, regex and choice"):
        StructuredOutput(**wrong)


def test_a_sample_is_asked_for_once():
    two = replace(GOOD, seeds=(1, 2))
    check_requests([two, replace(two, request_id="r=2")], [("r=3", 0)], 8, 4)
    check_requests([two], [("r=1", 2)], 8, 4)
    for requests, in_flight, index in (
        ([two], [("r=1", 1)], 1),
        ([two, two], [], 0),
        ([two, replace(GOOD, sample_indices=(1,))], [], 1),
    ):
        with pytest.raises(RolloutError, match=f"r=1: sample {index} is requested twice, or is in"):
            check_requests(requests, in_flight, 8, 4)


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
        (with_sampling(stop=("a", "")), "stop is .* not empty"),
        (with_sampling(stop=("a", "a")), "stop is .* each once"),
        (with_sampling(stop_token_ids=(4,)), "stop_token_ids are .* vocabulary of 4"),
        (with_sampling(stop_token_ids=(-1,)), "stop_token_ids are .* vocabulary of 4"),
        (with_sampling(stop_token_ids=(2, 2)), "stop_token_ids are .* each once"),
        (with_sampling(structured_output=FORM), "no structured output; engines .*: sglang, vllm"),
        (replace(GOOD, prefixes=((1,), (2,))), "2 prefixes for 1 seeds"),
        (replace(GOOD, prefixes=((4,),)), "token of a prefix is outside the vocabulary of 4"),
        (replace(GOOD, prefixes=((1,) * 5,)), "prefix has 5 tokens; need fewer than .* 5"),
        (replace(GOOD, draw_offsets=(1, 2)), "2 draw_offsets for 1 seeds"),
        (replace(GOOD, draw_offsets=(-1,)), "draw offset is -1"),
        (replace(GOOD, sample_indices=(0, 1)), "2 sample_indices for 1 seeds"),
        (replace(GOOD, sample_indices=(-1,)), "sample_indices are"),
        (replace(GOOD, seeds=(1, 2), sample_indices=(3, 3)), "sample_indices are .* each once"),
        (replace(GOOD, turn=-1), "turn is -1"),
        (replace(GOOD, images=(b"x",)), "got 1 images; .* takes none; engines .*: transformers"),
    ],
)
def test_what_is_wrong_is_named(request_, what):
    with pytest.raises(RolloutError, match=f"r=1: .*{what}"):
        check_requests([request_], [], context_length=8, vocab_size=4)
