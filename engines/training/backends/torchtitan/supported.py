"""Models that the backend torchtitan supports, without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.attention_needs import has_windows, rotary_type
from infra.errors import ConfigError

HAS_HEAD_NORMS = {"qwen3": True, "llama": False}
"""Supported `model_type` -> whether queries and keys are normalized per head."""


def check_model(hf_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model that TorchTitan's decoder would compute differently.

    Raises:
        ConfigError: names the unsupported feature.
    """
    kind = config.get("model_type")
    if kind not in HAS_HEAD_NORMS:
        needed = f"a {kind} model; need one of {', '.join(sorted(HAS_HEAD_NORMS))}"
        raise _refused(hf_dir, needed)
    rope, activation = rotary_type(config), config.get("hidden_act", "silu")
    layer_types = {*(config.get("layer_types") or ())} - {"full_attention"}
    unlike = {
        f"the activation {activation}": activation != "silu",
        "attention biases": config.get("attention_bias"),
        "biases in its MLP": config.get("mlp_bias"),
        f"rotary embeddings of type {rope}": rope != "default",
        f"layers of type {', '.join(sorted(layer_types))}": layer_types,
        "sliding windows": has_windows(config),
    }
    for what, is_there in unlike.items():
        if is_there:
            raise _refused(hf_dir, f"a {kind} model with {what}; need one without")


def _refused(hf_dir: Path, problem: str) -> ConfigError:
    return ConfigError(
        "model.path", f"got {hf_dir}, {problem}; choose another, or another training.backend"
    )
