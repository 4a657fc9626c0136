"""Streamed names against what `save_pretrained` writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from engines.checkpoint.hub_names import HubNames, hub_slots, named_state
from infra.errors import ConfigError

SHAPE = {
    "vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 8,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def make(model_type: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SHAPE)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("model_type", "identical"),
    [("qwen3", True), ("llama", True), ("phi3", True), ("qwen3_moe", False), ("mixtral", False)],
)
@pytest.mark.parametrize("from_disk", [False, True])
def test_streams_what_save_pretrained_writes(
    tmp_path: Path, model_type: str, identical: bool, from_disk: bool
) -> None:
    model = make(model_type)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    if from_disk:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = HubNames(model)
    assert names.identical == identical
    streamed = dict(names.stream(iter(named_state(model))))
    assert streamed.keys() == stored.keys()
    assert all(torch.equal(stored[name], streamed[name]) for name in stored)


def test_an_incomplete_stream_is_refused() -> None:
    model = make("qwen3_moe")
    with pytest.raises(ConfigError, match="cannot be streamed"):
        list(HubNames(model).stream(iter(named_state(model)[:-1])))


def test_tensors_that_are_joined_on_disk_are_refused() -> None:
    """HRM's query, key, value and gate are one tensor there: each alone has its name."""
    model = make("hrm_text")
    with pytest.raises(ConfigError, match=r"HrmTextForCausalLM joins tensors .*gqkv_proj"):
        list(HubNames(model).stream(iter(named_state(model))))
    with pytest.raises(ConfigError, match=r"HrmTextForCausalLM joins tensors .*gqkv_proj"):
        hub_slots(model)
