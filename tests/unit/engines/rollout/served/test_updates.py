"""What a process that holds the model takes of a weight source, and what it answers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3Config

from engines.errors import WeightSyncError
from engines.rollout.served.weight_receiver import (
    ModelLayout,
    NamedTensors,
    agreed,
    carry_out,
    order_of,
    read_layout,
)
from engines.weight_sync.in_process import SafetensorsSource

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
"""A buffer, which training computes with in float32."""


@pytest.fixture
def layout(tmp_path: Path) -> ModelLayout:
    DeepseekV3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2,
        n_group=1, topk_group=1, num_experts_per_tok=1, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    ).save_pretrained(tmp_path)  # fmt: skip
    return read_layout(tmp_path, "vllm", "bfloat16")


def sent(layout: ModelLayout, dtypes: dict[str, torch.dtype], path: Path) -> dict[str, Tensor]:
    """Tensors in bfloat16 but for these, in a file and out of it again through an order."""
    tensors = {
        name: torch.ones(shape, dtype=dtypes.get(name, torch.bfloat16))
        for name, shape in layout.tensors.items()
    }
    save_file(tensors, path)
    found: dict[str, Tensor] = {}

    def load(given: NamedTensors) -> None:
        found.update(given)

    receipt = agreed([carry_out(order_of(SafetensorsSource(path), layout, "bfloat16"), load)])
    assert receipt.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    return found


def test_what_is_float32_whatever_the_dtype_comes_as_that(
    layout: ModelLayout, tmp_path: Path
) -> None:
    assert layout.float32 == {BIAS}
    found = sent(layout, {BIAS: torch.float32}, tmp_path / "weights.safetensors")
    assert {name for name, tensor in found.items() if tensor.dtype == torch.float32} == {BIAS}
    assert found.keys() == layout.tensors.keys()


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [(BIAS, "bfloat16", "float32"), ("model.norm.weight", "float32", "bfloat16")],
)
def test_another_dtype_is_refused(
    layout: ModelLayout, tmp_path: Path, name: str, dtype: str, wanted: str
) -> None:
    dtypes = {BIAS: torch.float32, name: getattr(torch, dtype)}
    problem = f"{name}: sent torch.{dtype}, its rollout dtype is torch.{wanted}"
    with pytest.raises(WeightSyncError, match=problem):
        sent(layout, dtypes, tmp_path / "weights.safetensors")


def test_latent_attention_is_seen_by_its_projection(layout: ModelLayout, tmp_path: Path) -> None:
    assert layout.is_latent
    Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ).save_pretrained(tmp_path / "other")  # fmt: skip
    assert not read_layout(tmp_path / "other", "vllm", "float32").is_latent
