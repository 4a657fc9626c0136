"""What the engine refuses: options, models that it does not compute, and sequences too long."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all
from transformers import FuyuConfig

from engines.config.rollout import RolloutConfig
from engines.errors import RolloutError
from engines.rollout.base import create_rollout_engine
from engines.rollout.transformers import inference_model
from engines.rollout.transformers.inference_model import InferenceModel
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError


def test_options_are_checked():
    rollout = RolloutConfig(options={"max_prefil_tokens": 5})
    with pytest.raises(ConfigError, match=r"rollout\.options\.max_prefil_tokens.*max_prefill"):
        create_rollout_engine("transformers", Path("nowhere"), rollout, "float32", CPUPlatform())


@pytest.mark.parametrize(
    ("architecture", "changes", "what"),
    [
        ("qwen3_next", {}, "linear_attention"),
        ("gemma2", {}, "the gemma2 model has attention scores with a soft cap"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("diffllama", {}, "the diffllama model has layers that attend twice"),
        ("openai-gpt", {}, "is a OpenAIGPTLMHeadModel, whose attention cannot be replaced"),
        ("gptj", {"rotary_dim": 8}, "is a GPTJForCausalLM, whose attention cannot be replaced"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "linear_attention"),
        ("roberta", {"is_decoder": True}, "positions count from its padding token on"),
    ],
)
def test_architectures_it_cannot_compute_are_refused(build_lab, architecture, changes, what):
    lab = build_lab(architecture, **changes)
    with pytest.raises(ConfigError, match=what):
        lab.bare_engine()


def test_a_model_that_is_more_than_its_language_model_is_refused(tmp_path):
    FuyuConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a fuyu, which is more than its language model"):
        InferenceModel(tmp_path, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "changes", "what"),
    [
        ("diffllama", {}, "attends twice in one layer"),
        ("doge", {}, "needs attention with a mask"),
        ("nemotron", {}, "does not pass rollout_step to its attention"),
        ("bert", {}, "needs attention with later tokens"),
    ],
)
def test_attention_it_has_not_ends_the_first_forward_pass(
    build_lab, monkeypatch, architecture, changes, what
):
    lab = build_lab(architecture, **changes)
    # What a configuration tells is refused before that; here it shall be what it is refused for.
    monkeypatch.setattr(inference_model, "refusal", lambda config: None)
    with pytest.raises(RolloutError, match=what):
        generate_all(lab.engine(), lab.requests(1, 1))


def test_a_layer_without_attention_ends_the_first_forward_pass(build_lab, monkeypatch):
    class Recurrent(torch.nn.Module):
        def forward(self, hidden_states, **others):
            return hidden_states.cumsum(1), None

    lab = build_lab("qwen2_moe", num_experts=4, num_experts_per_tok=2)
    engine = lab.engine()
    engine._model._model.model.layers[1].self_attn = Recurrent()
    with pytest.raises(RolloutError, match="1 of 2 layers of a Qwen2MoeForCausalLM use"):
        generate_all(engine, lab.requests(1, 1))


def test_the_context_ends_where_rotary_factors_change(build_lab):
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    lab = build_lab("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    (request,) = lab.requests(1, 1, max_new_tokens=32)
    with pytest.raises(RolloutError, match="do not fit the context of 32"):
        lab.engine().generate([request])


def test_a_directory_without_configuration_is_refused(lab, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        replace(lab, directory=tmp_path).bare_engine()
