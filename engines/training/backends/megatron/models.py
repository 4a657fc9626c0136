"""Models that the backend megatron supports, without torch; others are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.attention_needs import has_windows, rotary_type
from infra.errors import ConfigError

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
_ROPE_TYPES = ("default", "linear", "llama3")


def check_model(hf_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model that Megatron-Core would compute differently from transformers.

    Raises:
        ConfigError: names the unsupported feature.
    """
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise _refused(hf_dir, f"a {kind} model; need one of {', '.join(SUPPORTED)}")
    rope, activation = rotary_type(config), config.get("hidden_act", "silu")
    needed = {
        "attention biases": kind != "qwen2" and config.get("attention_bias"),
        "biases in its MLP": config.get("mlp_bias"),
        f"the activation {activation}": activation != "silu",
        "sliding windows": has_windows(config),
        "dense layers between its mixtures": config.get("mlp_only_layers")
        or config.get("decoder_sparse_step", 1) != 1,
        "one normalised expert per token": config.get("norm_topk_prob")
        and config.get("num_experts_per_tok") == 1,
        f"rotary embeddings of type {rope}": rope not in _ROPE_TYPES,
    }
    for what, is_needed in needed.items():
        if is_needed:
            raise _refused(hf_dir, f"a {kind} model with {what}; need one without")


def _refused(hf_dir: Path, problem: str) -> ConfigError:
    return ConfigError(
        "model.path",
        f"got {hf_dir}, {problem}; choose another, or set training.backend: fsdp2",
    )
