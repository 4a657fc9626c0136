"""Writing tensors by their names on disk into a model that fuses them in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.tiny_models import SHAPES, write_tiny_models
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import (
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from engines.checkpoint.hub_names import HubNames, hub_slots, named_state
from infra.errors import ConfigError


@pytest.mark.parametrize("model_type", SHAPES)
def test_what_is_written_by_slots_is_what_transformers_loads(
    tmp_path: Path, model_type: str
) -> None:
    write_tiny_models(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / model_type, dtype=torch.float32)
    empty = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    parameters = dict(empty.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(float("nan"))
        slots = hub_slots(empty)
        stored = load_file(tmp_path / model_type / "model.safetensors")
        assert slots.keys() == stored.keys()
        for name, tensor in stored.items():
            slots[name].view(parameters[slots[name].parameter]).copy_(tensor)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameters[name], parameter), name


def square_model(operation: Any) -> Any:
    """A model whose weights of this name have another form on disk, of the same shape."""
    config = AutoConfig.for_model(
        "llama", vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model._weight_conversions = [
        WeightConverter(
            source_patterns="self_attn.q_proj.weight",
            target_patterns="self_attn.q_proj.weight",
            operations=[operation],
        )
    ]
    return model


def test_a_tensor_turned_into_its_own_shape_is_turned_back() -> None:
    """The digest cannot tell: both sides compute it of the tensor on disk."""
    model = square_model(Transpose(0, 1))
    streamed = dict(HubNames(model).stream(named_state(model)))
    name = "model.layers.0.self_attn.q_proj.weight"
    held = dict(model.named_parameters())[name].detach()
    assert torch.equal(streamed[name], held.t())
    received = torch.zeros_like(held)
    hub_slots(model)[name].view(received).copy_(streamed[name])
    assert torch.equal(received, held)


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor with memory that anything makes, and of all."""

    def __init__(self) -> None:
        super().__init__()
        self.num_largest = self.num_all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                self.num_largest = max(self.num_largest, each.numel())
                self.num_all += each.numel()
        return made


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_slots_of_large_stacks_take_no_memory(model_type: str) -> None:
    """A stack here has 1.6 billion values; places of each would take 13 GB."""
    config = AutoConfig.for_model(
        model_type, vocab_size=16, hidden_size=2048, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=768, moe_intermediate_size=768, num_experts=512,
        num_local_experts=512, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with LargestTensor() as made:
        slots = hub_slots(model)
    assert (made.num_largest, made.num_all) == (0, 0)
    stacks = {name for name, p in model.named_parameters() if p.numel() > 800_000_000}
    inside = [slot for slot in slots.values() if slot.parameter in stacks]
    assert (len(stacks), len(inside)) == (4, 2 * 3 * 512)


def test_rows_permuted_without_a_regular_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="rearranges model.layers.0.self_attn.q_proj.weight"):
        hub_slots(square_model(PermuteForRope()))


def test_persistent_buffer_has_a_slot_but_computed_one_has_none() -> None:
    config = AutoConfig.for_model(
        "minimax_m2", vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    buffers = dict(model.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    in_slots = {slot.parameter for slot in hub_slots(model).values()} & buffers.keys()
    assert in_slots == {"model.layers.0.mlp.e_score_correction_bias"}
