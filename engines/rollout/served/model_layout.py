"""Reads tensor shapes, vocabulary, context and end tokens from a model directory.

Reads only `config.json` and `generation_config.json` and allocates no weights; names and shapes are
those that `save_pretrained` writes. The engine may still not know the architecture.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.checkpoint.hub_names import hub_slots, served_float32_names
from engines.checkpoint.model_directory import rotary_limit, vision_model_type
from engines.checkpoint.stop_tokens import eos_token_ids
from infra.errors import ConfigError


@dataclass(frozen=True)
class ModelLayout:
    """Layout of one model.

    Attributes:
        architecture: class name, for a configuration that does not state it.
        tensors: shape of every tensor on disk, tied ones once.
        float32: tensors that are float32 whatever the dtype of the others.
        tied: parameters that share memory with one of `tensors`.
        context_length: limit of prompt and response together, in tokens.
    """

    architecture: str
    tensors: dict[str, tuple[int, ...]]
    float32: frozenset[str]
    tied: frozenset[str]
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]

    @property
    def is_latent(self) -> bool:
        """True if the attention is latent (MLA), which engines compute with other kernels."""
        return any(".kv_a_proj_with_mqa." in name for name in self.tensors)


def read_layout(hf_dir: Path, engine: str, dtype: str) -> ModelLayout:
    """Read the layout of a model directory, or raise a ConfigError; `engine` is named in errors."""
    if not (hf_dir / "config.json").is_file():
        raise ConfigError("model.path", f"got {hf_dir}; need a directory with config.json")
    sees = vision_model_type(hf_dir)
    if sees is not None:
        raise ConfigError(
            "model.path",
            f"{hf_dir} is a {sees}, which sees images; the rollout engine {engine} samples from "
            "text models; choose one",
        )
    config = AutoConfig.from_pretrained(
        hf_dir, trust_remote_code=False, local_files_only=True
    ).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    own = dict(model.named_parameters())
    limit = rotary_limit(config.to_dict())
    return ModelLayout(
        architecture=type(model).__name__,
        tensors={name: slot.size for name, slot in hub_slots(model).items()},
        float32=served_float32_names(hf_dir, getattr(torch, dtype)),
        tied=frozenset(n for n, _ in model.named_parameters(remove_duplicate=False)) - own.keys(),
        vocab_size=config.vocab_size,
        context_length=min(config.max_position_embeddings, limit or sys.maxsize),
        eos_token_ids=eos_token_ids(hf_dir, config),
    )
