"""Counts of parameters against transformers' own models on the meta device, and known sizes."""

import json
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)

from engines.config.training import LoraConfig
from engines.cost.model_config import PUBLISHED_MODELS
from engines.cost.model_shape import ModelShape

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 500,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_experts_per_tok": 2, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 24}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [0]}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "attention_bias": True}),
]


def count(auto_class: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in auto_class.from_config(config).parameters())


def plain(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize(("kind", "more"), MODELS)
def test_parameters_of_language_models(kind: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    shape = ModelShape.from_config(plain(config))
    assert shape.num_parameters == count(AutoModelForCausalLM, config)
    assert not shape.uncounted


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_parameters_of_value_models(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SIZES, num_labels=1)
    shape = ModelShape.from_config(plain(config), values=True)
    assert shape.num_parameters == count(AutoModelForTokenClassification, config)


def test_parameters_with_a_vision_tower() -> None:
    tower = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": 64, "patch_size": 6, "spatial_merge_size": 2,
    }  # fmt: skip
    config = AutoConfig.for_model("qwen2_5_vl", text_config=SIZES, vision_config=tower)
    shape = ModelShape.from_config(plain(config))
    assert shape.num_parameters == count(AutoModelForImageTextToText, config)


def test_uncounted_parts_are_named() -> None:
    shape = ModelShape.from_config({**SIZES, "model_type": "gemma3", "vision_config": {}})
    assert shape.uncounted == ("biases and further norms of gemma3 are not counted",)
    tower = {**SIZES, "model_type": "llava", "vision_config": {"depth": 2}}
    assert "the vision tower of llava is not counted" in ModelShape.from_config(tower).uncounted


def test_parameters_of_an_adapter() -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = AutoConfig.for_model("qwen3", **SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        adapted = get_peft_model(model, PeftConfig(r=4, target_modules="all-linear", use_dora=True))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shape = ModelShape.from_config(plain(config))
    assert shape.adapter_parameters(LoraConfig(rank=4, use_dora=True)) == trained
    some = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))
    hidden, query, inner = 64, shape.linears["q_proj"][1], 96
    assert shape.adapter_parameters(some) == 3 * 4 * (hidden + query + inner + hidden)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        # As their model cards state.
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.49),
        ("Qwen/Qwen2.5-7B-Instruct", 7.61),
        ("Qwen/Qwen2.5-32B", 32.5),
        ("Qwen/Qwen3-8B-Base", 8.2),
        ("Qwen/Qwen3-32B", 32.8),
        ("Qwen/Qwen3-30B-A3B-Base", 30.5),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", 141),
        ("OpenRLHF/Llama-3-8b-sft-mixture", 8.03),
    ],
)
def test_sizes_of_published_models(model: str, billions: float) -> None:
    shape = ModelShape.from_config(PUBLISHED_MODELS[model])
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_decoding_reads_the_chosen_experts() -> None:
    shape = ModelShape.from_config(PUBLISHED_MODELS["Qwen/Qwen3-30B-A3B-Base"])
    # 3.3 B are active per token, of which 0.3 B are the embedding, which is not read.
    assert shape.num_read(1) / 1e9 == pytest.approx(3.3 - 0.31, rel=0.03)
    everything = shape.num_parameters - shape.embedding_parameters
    assert shape.num_read(10_000) == pytest.approx(everything)
