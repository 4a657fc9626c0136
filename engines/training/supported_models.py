"""Models that the built-in backends can train, decided from `config.json` alone and without torch.

Promises: a text model that is refused here would be computed otherwise than by transformers.
Does not promise that every other model works: some are refused when a rank builds them.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engines.attention_needs import has_windows, rotary_type, unusual_attention
from engines.checkpoint.model_directory import VISION_MODEL_TYPES, vision_model_type
from engines.config.backends import BACKENDS
from engines.config.training import TrainingConfig
from infra.errors import ConfigError

MEGATRON_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
TITAN_HEAD_NORMS = {"llama": False, "qwen3": True}
"""`model_type` that torchtitan supports -> True if queries and keys are normalized per head."""


def check_vision(hf_dir: Path, training: TrainingConfig, *, values: bool = False) -> None:
    """Refuse a vision-language model that the backend, the layout or a value head cannot train.

    Backends of plugins are not checked. `values` is True for a value model.

    Raises:
        ConfigError: the architecture, backend, model type or layout does not support it.
    """
    architecture, backend = vision_model_type(hf_dir), training.backend
    if architecture is None or backend not in BACKENDS:
        return
    able = [name for name, other in BACKENDS.items() if "vlm" in other.features]
    for problem, holds in {
        f"{backend} trains text models; use {' or '.join(able)}": backend not in able,
        f"of those only {', '.join(VISION_MODEL_TYPES)} can be trained": (
            architecture not in VISION_MODEL_TYPES
        ),
        "a value model cannot; choose a text model": values,
        "Ulysses cannot cut them; set training.ulysses_size to 1": training.ulysses_size > 1,
    }.items():
        if holds:
            raise ConfigError(
                "model.path", f"{hf_dir} is a {architecture}, which sees images; {problem}"
            )


def check_packed(hf_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuse a text model whose attention `rl_varlen` does not compute.

    Raises:
        ConfigError: names the unsupported feature.
    """
    if lacking := unusual_attention(config):
        raise ConfigError(
            "model.path",
            f"got {hf_dir}, a {config.get('model_type')} model with {lacking}; need attention that "
            "packed sequences can train with; choose another architecture",
        )


def check_megatron(hf_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model that Megatron-Core would compute differently.

    Raises:
        ConfigError: names the unsupported feature.
    """
    unlike = {
        "attention biases": config.get("model_type") != "qwen2" and config.get("attention_bias"),
        "dense layers between its mixtures": config.get("mlp_only_layers")
        or config.get("decoder_sparse_step", 1) != 1,
        "one normalised expert per token": config.get("norm_topk_prob")
        and config.get("num_experts_per_tok") == 1,
    }
    problem = _problem(config, MEGATRON_MODELS, ("default", "linear", "llama3"), unlike)
    _refuse(hf_dir, problem, "set training.backend: fsdp2")


def check_torchtitan(hf_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model that TorchTitan's decoder would compute differently.

    Raises:
        ConfigError: names the unsupported feature.
    """
    layer_types = {*(config.get("layer_types") or ())} - {"full_attention"}
    unlike = {
        "attention biases": config.get("attention_bias"),
        f"layers of type {', '.join(sorted(layer_types))}": layer_types,
    }
    problem = _problem(config, TITAN_HEAD_NORMS, ("default",), unlike)
    _refuse(hf_dir, problem, "another training.backend")


def _refuse(hf_dir: Path, problem: str | None, choice: str) -> None:
    if problem is not None:
        raise ConfigError("model.path", f"got {hf_dir}, {problem}; choose another, or {choice}")


def _problem(
    config: Mapping[str, Any],
    kinds: Collection[str],
    rope_types: Collection[str],
    unlike: Mapping[str, Any],
) -> str | None:
    """Return why a Llama-like decoder cannot compute a model; `unlike` has features to refuse."""
    kind = config.get("model_type")
    if kind not in kinds:
        return f"a {kind} model; need one of {', '.join(kinds)}"
    rope, activation = rotary_type(config), config.get("hidden_act", "silu")
    features = {
        **unlike,
        "biases in its MLP": config.get("mlp_bias"),
        f"the activation {activation}": activation != "silu",
        f"rotary embeddings of type {rope}": rope not in rope_types,
        "sliding windows": has_windows(config),
    }
    found = next((what for what, is_there in features.items() if is_there), None)
    return None if found is None else f"a {kind} model with {found}; need one without"
