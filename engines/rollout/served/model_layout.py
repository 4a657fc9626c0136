"""What a model directory says before an engine has read it: tensors, vocabulary, context, ends.

Promises: reads `config.json` and `generation_config.json` alone and allocates no weight; names
and shapes of the tensors are those that `save_pretrained` writes.
Does not promise that the engine knows the architecture.
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
    """One model.

    Attributes:
        architecture: class of it, for a configuration that does not name it.
        tensors: shape of every tensor on disk, tied ones once.
        float32: names of those that are float32 whatever the dtype of the others.
        tied: names of parameters that share their memory with one of them.
        vocab_size: token ids are below this.
        context_length: tokens that prompt and response may have together.
        eos_token_ids: what ends a sample.
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
        """Whether its attention is latent (MLA), which engines have other kernels for."""
        return any(".kv_a_proj_with_mqa." in name for name in self.tensors)


def read_layout(hf_dir: Path, engine: str, dtype: str) -> ModelLayout:
    """The layout of a model.

    Args:
        hf_dir: model directory with `config.json`; weights in it are not read.
        engine: name of the rollout engine, for errors.
        dtype: of its weights, `float32` or `bfloat16`.

    Returns:
        Its layout.

    Raises:
        ConfigError: no configuration there, or a model that sees images.
    """
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
