"""What is sampled: against plain forward passes, `generate`, and the engine under other loads."""

import itertools
import json
import random

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all

from engines.errors import RolloutError
from engines.types import RolloutRequest, SamplingParams

ARCHITECTURES = {
    "qwen3": {},
    "qwen3-untied": {"tie_word_embeddings": False},
    "qwen2": {"head_dim": None},
    "llama": {"num_key_value_heads": 4},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "phi3-longrope": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    # Windows shorter than most prompts: in every layer, and in some.
    "mistral": {"sliding_window": 5},
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}


def tokens_of(completions) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(c.request_id, c.sample_index, c.token_ids.tolist()) for c in completions]


@pytest.mark.parametrize("case", list(ARCHITECTURES))
def test_engine_logprobs_match_teacher_forcing_around_an_update(case, build_lab):
    changes = {k: v for k, v in ARCHITECTURES[case].items() if v is not None}
    lab = build_lab("llama" if case.startswith("llama") else case.split("-")[0], **changes)
    engine = lab.engine()
    requests = lab.requests(num_prompts=5, num_samples=3, temperature=0.7)
    before = generate_all(engine, requests)
    assert lab.worst_difference(lab.model, requests, before) <= 1e-5
    other = lab.other_weights(seed=11)
    lab.send(engine, other, version=1)
    after = generate_all(engine, requests)
    assert lab.worst_difference(other, requests, after) <= 1e-5
    assert lab.worst_difference(lab.model, requests, after) > 0.1  # the test can tell them apart


@pytest.mark.parametrize(
    "sampling", [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8, "temperature": 1.3}]
)
def test_logprobs_are_those_of_the_filtered_distribution(lab, sampling):
    requests = lab.requests(num_prompts=4, num_samples=3, **sampling)
    completions = generate_all(lab.engine(), requests)
    assert lab.worst_difference(lab.model, requests, completions) <= 1e-5


def test_requests_of_different_distributions_share_a_batch(lab):
    requests = [
        *lab.requests(2, 2, seed=1, temperature=0.0),
        *lab.requests(2, 2, seed=2, temperature=0.5, top_k=3),
        *lab.requests(2, 2, seed=3, top_p=0.6),
        *lab.requests(2, 2, seed=4),
    ]
    engine = lab.engine()
    together = generate_all(engine, requests)
    assert lab.worst_difference(lab.model, requests, together) <= 1e-5
    alone = [c for request in requests for c in generate_all(engine, [request])]
    assert tokens_of(together) == tokens_of(alone)


def test_greedy_equals_generate(lab):
    requests = lab.requests(num_prompts=6, num_samples=2, max_new_tokens=20, temperature=0.0)
    completions = generate_all(lab.engine(), requests)
    for request, completion in zip(requests, completions[::2], strict=True):
        reference = lab.model.generate(
            torch.tensor([request.prompt_ids]),
            attention_mask=torch.ones((1, len(request.prompt_ids)), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=20,
        )
        wanted = reference[0, len(request.prompt_ids) :].tolist()
        assert completion.token_ids.tolist() == wanted
    assert [c.token_ids.tolist() for c in completions[::2]] == [
        c.token_ids.tolist() for c in completions[1::2]
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_sequences": 1},
        {"max_num_sequences": 3},
        {"max_num_sequences": 7},
        {"max_num_sequences": 10},
        {"max_num_sequences": 7, "options": {"max_prefill_tokens": 1}},
        {"max_num_sequences": 40},
    ],
    ids=str,
)
def test_scheduling_does_not_change_the_samples(lab, settings):
    requests = lab.requests(num_prompts=6, num_samples=4)
    expected = generate_all(lab.engine(), requests)
    assert len({tuple(c.token_ids) for c in expected}) > 12  # there is something to change
    shuffled = random.Random(5).sample(requests, len(requests))
    found = generate_all(lab.engine(**settings), shuffled)
    found.sort(key=lambda c: (c.request_id, c.sample_index))
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-5)


def test_equal_seeds_give_equal_samples_and_others_differ(lab):
    sampling = SamplingParams(16)
    request = RolloutRequest("r", (5, 6, 7), sampling, (42, 42, 43, 2**64 - 1))
    first, same, other, largest = generate_all(lab.engine(), [request])
    assert first.token_ids.tolist() == same.token_ids.tolist()
    assert len({tuple(each.token_ids) for each in (first, other, largest)}) == 3


def splitmix64_uniform(seed: int, index: int) -> float:
    """Number `index` of the stream of `seed`, on Python integers."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    return (mix((mix(seed & mask) + (index + 1) * gamma) & mask) >> 11) / 2**53


@torch.no_grad()
def test_samples_are_those_of_a_plain_loop(lab):
    """One sequence at a time, the whole sequence anew for each token, inverse of the CDF."""
    requests = lab.requests(num_prompts=4, num_samples=2, max_new_tokens=10, temperature=0.8)
    found = generate_all(lab.engine(max_num_sequences=5), requests)
    for completion, (request, seed) in zip(
        found, [(r, seed) for r in requests for seed in r.seeds], strict=True
    ):
        ids = list(request.prompt_ids)
        for index in range(10):
            logits = lab.model(input_ids=torch.tensor([ids])).logits[0, -1].double()
            sums = itertools.accumulate((logits / 0.8).softmax(-1).tolist())
            target = splitmix64_uniform(seed, index)
            token = next(token for token, total in enumerate(sums) if total > target)
            ids.append(token)
            if token == lab.eos:
                break
        assert completion.token_ids.tolist() == list(ids[len(request.prompt_ids) :])


@pytest.mark.parametrize("max_num_sequences", [64, 3])
def test_no_token_is_computed_twice_and_none_is_padding(lab, max_num_sequences, monkeypatch):
    """Every prompt goes through the model once, every sampled token but the last once."""
    engine = lab.engine(max_num_sequences=max_num_sequences)
    seen = []
    for name in ("prefill", "decode"):
        compute = getattr(engine._model, name)

        def counted(ids, step, more, compute=compute):
            seen.append(ids.numel() if torch.is_tensor(ids) else sum(map(len, ids)))
            return compute(ids, step, more)

        monkeypatch.setattr(engine._model, name, counted)
    requests = lab.requests(num_prompts=4, num_samples=7)
    completions = generate_all(engine, requests)
    num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    assert sum(seen) == num_prompt_tokens + sum(len(c.token_ids) - 1 for c in completions)


def test_samples_end_at_the_first_eos_or_at_their_limit(lab):
    requests = [
        *lab.requests(6, 4, max_new_tokens=25, seed=1),
        *lab.requests(3, 2, max_new_tokens=1, seed=2),
        *lab.requests(3, 2, max_new_tokens=5, seed=3),
    ]
    by_id = {request.request_id: request for request in requests}
    completions = generate_all(lab.engine(), requests)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert lab.eos not in c.token_ids[:-1]
        assert (c.token_ids[-1] == lab.eos) == (c.finish_reason == "stop")
        limit = by_id[c.request_id].sampling.max_new_tokens
        assert len(c.token_ids) == limit or c.finish_reason == "stop"
        assert len(c.token_ids) == len(c.logprobs) == len(c.policy_versions) <= limit


def test_generation_config_names_the_stop_tokens(build_lab):
    lab = build_lab()
    stops = [5, 9, 11]
    (lab.directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    completions = generate_all(lab.engine(), lab.requests(6, 4, max_new_tokens=30))
    last = {c.token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert last == set(stops)
    assert any(lab.eos in c.token_ids for c in completions)


def test_the_whole_context_can_be_used(build_lab):
    lab = build_lab(max_position_embeddings=40, eos_token_id=None)
    request = RolloutRequest("r", tuple(range(4, 14)), SamplingParams(30), (1, 2))
    completions = generate_all(lab.engine(), [request])
    assert [len(c.token_ids) for c in completions] == [30, 30]
    assert lab.worst_difference(lab.model, [request], completions) <= 1e-5


def test_bfloat16_stays_near_the_float32_reference(lab):
    engine = lab.bare_engine("bfloat16")
    lab.send(engine, lab.model, 0, "bfloat16")
    requests = lab.requests(4, 4)
    completions = generate_all(engine, requests)
    difference = lab.worst_difference(lab.model, requests, completions)
    assert 1e-4 < difference < 0.5


def test_global_random_state_is_left_alone(lab):
    state = torch.get_rng_state()
    generate_all(lab.engine(), lab.requests(2, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_damaged_weights_are_an_error_not_a_sample(lab):
    model = lab.other_weights(seed=1)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    engine = lab.engine()
    lab.send(engine, model, version=1)
    with pytest.raises(RolloutError, match="not finite"):
        generate_all(engine, lab.requests(2, 2))
    lab.send(engine, lab.model, version=2)  # the engine recovers
    assert len(generate_all(engine, lab.requests(2, 2))) == 4
