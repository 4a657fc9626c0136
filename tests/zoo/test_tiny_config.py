"""Configurations made tiny: what a family has by default it has still, and everything is small."""

from typing import Any

import pytest
import torch
from tiny_config import (
    CONTEXT,
    HEAD_WIDTH,
    NUM_HEADS,
    VOCABULARY,
    WIDE_HEAD,
    WIDTH,
    WINDOW,
    kept_layers,
    shrunk,
    tiny_config,
    with_wide_heads,
)
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAX_PARAMETERS = 500_000
MODEL_TYPES = (
    "qwen2", "llama", "gpt2", "gemma2", "gemma3_text", "gemma4_text", "phi3", "mixtral",
    "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "opt", "falcon",
)  # fmt: skip


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tiny_model_has_the_modules_of_the_default(model_type: str) -> None:
    tiny, default = (
        meta_model(config) for config in (tiny_config(model_type), CONFIG_MAPPING[model_type]())
    )
    kinds = ({type(module) for module in model.modules()} for model in (tiny, default))
    assert len(set(map(frozenset, kinds))) == 1
    assert sum(p.numel() for p in tiny.parameters()) <= MAX_PARAMETERS
    assert tiny.config.vocab_size == VOCABULARY


def test_sizes_have_one_number_by_any_name() -> None:
    gpt2: Any = tiny_config("gpt2")
    assert (gpt2.n_embd, gpt2.n_layer, gpt2.n_head, gpt2.n_positions) == (
        WIDTH, 2, NUM_HEADS, CONTEXT,
    )  # fmt: skip
    qwen: Any = tiny_config("qwen3")
    assert (qwen.hidden_size, qwen.head_dim, qwen.bos_token_id) == (WIDTH, HEAD_WIDTH, None)


def test_grouped_heads_stay_grouped_and_others_do_not() -> None:
    assert tiny_config("mixtral").num_key_value_heads == NUM_HEADS // 2
    assert tiny_config("qwen2").num_key_value_heads == NUM_HEADS
    assert tiny_config("gemma").num_key_value_heads == NUM_HEADS


def test_a_layer_of_each_kind_stays_at_its_place_in_the_order() -> None:
    gemma: Any = tiny_config("gemma3_text")
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert gemma.sliding_window == WINDOW
    llama4: Any = tiny_config("llama4_text")
    assert llama4.layer_types == ["chunked_attention", "full_attention"]
    assert llama4.no_rope_layers == [1, 0]
    assert llama4.moe_layers == [0, 1]


def test_layers_that_share_keys_have_earlier_ones_of_their_kind() -> None:
    gemma: Any = tiny_config("gemma3n_text")
    assert gemma.num_hidden_layers == len(gemma.layer_types) == len(gemma.intermediate_size)
    shared = gemma.layer_types[-gemma.num_kv_shared_layers :]
    assert set(shared) <= set(gemma.layer_types[: -gemma.num_kv_shared_layers])


def test_at_least_two_layers_stay() -> None:
    assert kept_layers({"num_hidden_layers": 24}) == [0, 1]
    assert kept_layers({"num_hidden_layers": 1}) == [0]
    assert kept_layers({"hidden_size": 8}) == []
    layers = {"num_hidden_layers": 4, "layer_types": ["a", "a", "a", "b"]}
    assert kept_layers(layers) == [0, 3]
    crossed = {**layers, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    assert kept_layers(crossed) == [0, 1, 3]


def test_nested_configurations_are_shrunk_too() -> None:
    default: Any = CONFIG_MAPPING["gemma3"]()
    config: Any = shrunk(default)
    assert config.text_config.hidden_size == config.vision_config.hidden_size == WIDTH
    assert config.text_config.num_hidden_layers == config.vision_config.num_hidden_layers == 2
    assert default.text_config.hidden_size > WIDTH
    assert config.image_token_index < VOCABULARY


def test_rotary_sections_add_up_to_the_pairs_of_a_head() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}
    made: Any = shrunk(AutoConfig.for_model("qwen3_vl_text", rope_parameters=rope))
    section = made.rope_parameters["mrope_section"]
    assert len(section) == 3
    assert sum(section) == HEAD_WIDTH // 2


def test_special_tokens_are_in_the_vocabulary() -> None:
    config: Any = tiny_config("llama4_text")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": WIDE_HEAD}),
        ("phi3", {"num_attention_heads": 2, "num_key_value_heads": 1}),
        ("gpt2", {"n_head": 2}),
        ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}),
    ],
)
def test_wide_heads_are_as_wide_as_engines_have_them(
    model_type: str, fields: dict[str, int]
) -> None:
    config = with_wide_heads(tiny_config(model_type))
    assert {name: getattr(config, name) for name in fields} == fields
    model = meta_model(config)
    saved = type(config)(**config.to_diff_dict())
    again = meta_model(saved)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in again.named_parameters()
    }
