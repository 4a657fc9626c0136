"""Tiny models on disk, without a tokenizer: the training engine does not read one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_model(model_type, **config)`: directory of a random float32 model."""

    def make(model_type: str, **config: Any) -> Path:
        path = tmp_path_factory.mktemp(model_type)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(model_type, **{**BASE, **config}), dtype=torch.float32
            )
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def qwen3_dir(make_model: Callable[..., Path]) -> Path:
    """A tied Qwen3 of 20 thousand parameters."""
    return make_model("qwen3", tie_word_embeddings=True)
