"""The decode step that is written out, against the modules of transformers that it stands for."""

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all

from engines.rollout.transformers.attention import DecodeStep, PrefillStep
from engines.rollout.transformers.decoder import ARCHITECTURES, is_covered
from engines.rollout.transformers.inference_model import InferenceModel
from engines.rollout.transformers.kv_cache import KVCache
from engines.types import RolloutRequest, SamplingParams

LENGTHS = (3, 9, 14)
MODELS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {}),
    ("qwen3", {}),
]
LIMIT = 300
"""Of tokens; twice it, and half of it, is where a table of angles may grow."""
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def loaded(lab, dtype: torch.dtype = torch.float32) -> InferenceModel:
    model = InferenceModel(lab.directory, dtype, torch.device("cpu"))
    load(model, lab.model)
    return model


def load(model: InferenceModel, reference: torch.nn.Module) -> None:
    dtype = next(model._model.parameters()).dtype
    model.load((name, p.detach().to(dtype)) for name, p in reference.named_parameters())


@torch.inference_mode()
def one_step(model: InferenceModel, *, written_out: bool) -> torch.Tensor:
    """(B, V) logits of a token behind prompts of different lengths."""
    cache = KVCache(len(LENGTHS), model.context_length)
    cache.reserve(len(LENGTHS), max(LENGTHS) + 1)
    prompts = PrefillStep.build(cache, 0, LENGTHS, [1] * len(LENGTHS), torch.device("cpu"))
    ids = (torch.arange(sum(LENGTHS)) % 20 + 2).split(LENGTHS)
    model.prefill([each.tolist() for each in ids], prompts)
    step = DecodeStep(cache, torch.tensor(LENGTHS), max(LENGTHS) + 1)
    ids = torch.tensor([5, 6, 7])
    if written_out:
        return model.decode(ids, step)
    return model._logits(ids[:, None], step.position_B[:, None], step, 0)[:, -1]


@pytest.mark.parametrize(("architecture", "changes"), MODELS)
def test_it_computes_what_the_modules_compute(build_lab, architecture, changes) -> None:
    lab = build_lab(architecture, **changes)
    model = loaded(lab)
    assert is_covered(model._model)
    for seed in (None, 11):
        if seed is not None:  # nothing of the weights before may be left in it
            load(model, lab.other_weights(seed))
        found, expected = (one_step(model, written_out=form) for form in (True, False))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [
        *(("llama", rope) for rope in ROPES),
        *((each, "dynamic") for each in ("mistral", "qwen2", "qwen3")),
    ],
)
@pytest.mark.parametrize("context_length", [128, LIMIT])
def test_rope_angles_match_transformers_to_the_end_of_context(
    build_lab, architecture: str, rope: str, context_length: int
) -> None:
    parameters = {"rope_type": rope, "rope_theta": 10_000.0, **ROPES[rope]}
    if rope == "longrope":
        parameters["original_max_position_embeddings"] = context_length
    lab = build_lab(
        architecture,
        eos_token_id=None,
        max_position_embeddings=2 * LIMIT if rope == "longrope" else context_length,
        rope_parameters=parameters,
    )
    engine = lab.engine()
    assert is_covered(engine._model._model)
    prompt = tuple(4 + index % 20 for index in range(30))
    sampling = SamplingParams(context_length - len(prompt))
    requests = [
        RolloutRequest("whole", prompt, sampling, (1, 2)),
        RolloutRequest("short", prompt[:5], SamplingParams(20), (3,)),
    ]
    # Twice: the first batch leaves its angles to the second.
    for _ in range(2):
        completions = generate_all(engine, requests)
        assert lab.worst_difference(lab.model, requests, completions) <= 1e-4


def test_in_bfloat16_it_rounds_no_worse_than_the_modules(build_lab) -> None:
    lab = build_lab("qwen3")
    exact = one_step(loaded(lab), written_out=False)
    model = loaded(lab, torch.bfloat16)
    errors = [(one_step(model, written_out=form).float() - exact).abs().mean() for form in (1, 0)]
    assert errors[0] < 1.5 * errors[1]


def test_weights_lie_in_memory_once_and_are_given_back(build_lab) -> None:
    lab = build_lab("qwen3")
    model = loaded(lab)
    expected = one_step(model, written_out=True)
    weights = list(model._model.parameters())
    memory = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
    assert sum(memory.values()) == sum(weight.nbytes for weight in weights)
    model.release()
    assert model._decoder is None
    assert sum(weight.untyped_storage().nbytes() for weight in weights) == 0
    model.allocate()
    load(model, lab.model)
    assert torch.equal(one_step(model, written_out=True), expected)


def test_other_architectures_are_left_to_their_modules(build_lab) -> None:
    model = loaded(build_lab("olmo2"))
    assert type(model._model).__name__ not in ARCHITECTURES
    assert model._decoder is None
