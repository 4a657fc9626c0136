"""Counted operations against torch's own counter on real models, and by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from engines.config.training import LoraConfig, TrainingConfig
from engines.training.base import flops_of
from engines.training.spec import EngineSpec, ModelType
from engines.training.step.flops import ModelFlops, TrainingFlops
from hardware.cpu import CPUPlatform

BASE = {
    "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 112, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {},
    "starcoder2": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen2_moe": {
        "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
    },
    "deepseek_v3": {**LATENT, "q_lora_rank": 32},
    "deepseek_v3-plain-query": {**LATENT, "model_type": "deepseek_v3", "q_lora_rank": None},
}  # fmt: skip
LENGTH, NUM_SEQUENCES = 48, 3


def model_config(name: str) -> PretrainedConfig:
    fields: dict[str, Any] = {"model_type": name, **BASE, **MODELS[name]}
    config = AutoConfig.for_model(**fields)
    config._experts_implementation = "eager"  # the grouped kernel has no counter
    return config


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_operations_torch_counts(name: str) -> None:
    config = model_config(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(0, 160, (NUM_SEQUENCES, LENGTH))
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    flops = ModelFlops.from_config(config.to_dict())
    lengths = [LENGTH] * NUM_SEQUENCES
    # An eager model multiplies the whole square of scores: twice what a causal mask needs.
    square = 3 * 48 * 48 * sum(n for _, n in flops.windows) * flops.attention_per_pair / 2
    ours = flops.forward_flops(lengths) + square
    assert ours == pytest.approx(forward.get_total_flops(), rel=0.02)
    total = forward.get_total_flops() + backward.get_total_flops()
    train = TrainingFlops(flops).model_flops(lengths, sum(lengths))
    assert train + 3 * square == pytest.approx(total, rel=0.02)


def test_attention_is_the_quadratic_term() -> None:
    # One layer, 2 heads of 4: 8 + 8 multiply-adds a pair, 10 * 10 / 2 pairs.
    flops = ModelFlops(0.0, 0.0, 32.0, ((None, 1),))
    assert flops.forward_flops([10]) == 32 * 50
    assert flops.forward_flops([10, 10]) == 2 * flops.forward_flops([10])
    assert flops.forward_flops([20]) == 4 * flops.forward_flops([10])


def test_a_window_bounds_the_pairs() -> None:
    # 10 tokens that see at most 4: the band of 4 x 10 less the missing triangle 4 * 4 / 2.
    assert ModelFlops(0.0, 0.0, 1.0, ((4, 1),)).forward_flops([10]) == 32
    assert ModelFlops(0.0, 0.0, 1.0, ((40, 1),)).forward_flops([10]) == 50
    config = {"model_type": "qwen2", **BASE, "sliding_window": 16}
    assert ModelFlops.from_config({**config, "use_sliding_window": False}).windows == ((None, 2),)
    config |= {"use_sliding_window": True}
    assert ModelFlops.from_config({**config, "max_window_layers": 1}).windows == (
        (None, 1),
        (16, 1),
    )
    kinds = ["sliding_attention", "full_attention"]
    assert ModelFlops.from_config({**config, "layer_types": kinds}).windows == ((16, 1), (None, 1))
    assert ModelFlops.from_config({**BASE, "sliding_window": 16}).windows == ((16, 2),)


def test_a_mixture_of_qwen3_has_its_window_in_every_layer() -> None:
    config = {"model_type": "qwen3_moe", **BASE, "sliding_window": 16, "max_window_layers": 1}
    assert ModelFlops.from_config(config).windows == ((None, 2),)
    config |= {"use_sliding_window": True}
    assert ModelFlops.from_config(config).windows == ((16, 2),)


def test_qwen3_0_6b_by_hand() -> None:
    config = {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    }  # fmt: skip
    flops = ModelFlops.from_config(config)
    # q and o 1024 x 2048 each, k and v 1024 x 1024 each, three of 1024 x 3072.
    weights = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    assert weights == 440_401_920
    assert flops.layers_per_token == 2 * weights
    assert flops.head_per_token == 2 * 1024 * 151_936
    per_token = TrainingFlops(flops).model_flops([16_384], 16_384) / 16_384
    # 6 per weight, and 6 x length x layers x heads x head_dim with the causal half.
    assert per_token == 6 * (weights + 1024 * 151_936) + 6 * 16_384 * 28 * 2048


def test_predicted_tokens_value_heads_and_what_is_done_twice() -> None:
    config = {"model_type": "qwen3", **BASE}
    flops, value = ModelFlops.from_config(config), ModelFlops.from_config(config, num_outputs=1)
    lengths = [30, 7]
    layers = flops.forward_flops(lengths, num_predicted=0)
    assert flops.forward_flops(lengths) == layers + 37 * 2 * 64 * 160
    assert flops.forward_flops(lengths, 10) == layers + 10 * 2 * 64 * 160
    assert value.forward_flops(lengths) == layers + 37 * 2 * 64
    assert sum(flops.sequence_costs(lengths)) == pytest.approx(flops.forward_flops(lengths))
    train = TrainingFlops(flops)
    assert train.model_flops(lengths, 10) == 3 * flops.forward_flops(lengths, 10)
    assert train.hardware_flops(lengths, 10) == train.model_flops(lengths, 10)
    again = TrainingFlops(flops, layers_recomputed=True, logits_recomputed=True)
    assert again.model_flops(lengths, 10) == train.model_flops(lengths, 10)
    assert again.hardware_flops(lengths, 10) == pytest.approx(4 * flops.forward_flops(lengths, 10))
    layers_again = TrainingFlops(flops, layers_recomputed=True).hardware_flops(lengths, 10)
    assert layers_again == train.model_flops(lengths, 10) + layers


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2_moe"])
def test_frozen_weights_have_no_gradients_to_compute(name: str) -> None:
    config = model_config(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.requires_grad_(False)
    ids = torch.randint(0, 160, (NUM_SEQUENCES, LENGTH))
    # As an adapter of the first layer has it.
    embeddings = model.get_input_embeddings()(ids).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embeddings, use_cache=False).logits.sum().backward()
    flops = TrainingFlops(ModelFlops.from_config(config.to_dict()), weights_frozen=True)
    lengths = [LENGTH] * NUM_SEQUENCES
    windows = flops.model.windows
    square = 3 * 48 * 48 * sum(n for _, n in windows) * flops.model.attention_per_pair / 2
    ours = flops.model_flops(lengths, sum(lengths)) + 3 * square
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_what_an_engine_counts_follows_from_its_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **BASE}))

    def counted(model_type: ModelType = "language_model", **training: Any) -> TrainingFlops:
        config = TrainingConfig(**training)
        spec = EngineSpec(tmp_path, config, None, 1, CPUPlatform(), 0, model_type=model_type)
        flops = flops_of(spec)
        assert flops is not None
        return flops

    plain = counted()
    # The head's backward pass makes its logits anew, whatever the tile.
    assert plain == TrainingFlops(plain.model, logits_recomputed=True)
    assert counted(gradient_checkpointing=True).layers_recomputed
    assert counted(lora=LoraConfig(rank=4)).weights_frozen
    value = counted("value_model")
    assert value.model.head_per_token == 2 * 64
    assert not value.logits_recomputed
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert flops_of(EngineSpec(tmp_path, TrainingConfig(), None, 1, CPUPlatform(), 0)) is None


def test_the_language_part_of_a_vision_model() -> None:
    config = {"model_type": "qwen3", **BASE}
    nested = {"model_type": "some_vl", "text_config": config, "vision_config": {"hidden_size": 9}}
    assert ModelFlops.from_config(nested) == ModelFlops.from_config(config)


def test_what_cannot_be_counted_is_named() -> None:
    with pytest.raises(ValueError, match="intermediate_size: got None in config.json"):
        ModelFlops.from_config({**BASE, "intermediate_size": None})
    with pytest.raises(ValueError, match="layer_types: got 'linear_attention'"):
        ModelFlops.from_config({**BASE, "layer_types": ["full_attention", "linear_attention"]})
