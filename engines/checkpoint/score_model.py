"""Write a value model as transformers' sequence classification model with one output.

Promises: the directory loads with `AutoModelForSequenceClassification` and gives a single
conversation the engine's score; the head's name is checked before training starts.
Does not promise batches: a padding token that also ends conversations is removed.
"""

import json
import shutil
from collections.abc import Iterator, Set
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from engines.checkpoint.export import write_model
from engines.checkpoint.model_directory import check_reward_model
from engines.errors import CheckpointError
from infra.errors import ConfigError

HEAD = "score."
BIAS = f"{HEAD}bias"
"""Bias of a value model's head, which a sequence classification model lacks; held at 0."""
_CONFIG = "config.json"


def write_score_config(hf_dir: Path, last_tokens: Set[int], out_dir: Path) -> None:
    """Write the exported model's configuration and tokenizer to `out_dir`, which is replaced.

    `last_tokens` end a conversation. Raises `ConfigError` if transformers has no such model.
    """
    shutil.rmtree(out_dir, ignore_errors=True)
    shutil.copytree(hf_dir, out_dir, ignore=shutil.ignore_patterns("generation_config.json"))
    config = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False, num_labels=1)
    with torch.device("meta"):
        try:
            model = AutoModelForSequenceClassification.from_config(config)
        except ValueError:
            raise ConfigError(
                "model.path",
                f"got a {config.model_type}, for which transformers has no sequence classification "
                "model; choose another architecture for the reward model",
            ) from None
    if {name for name, _ in model.named_parameters() if name.startswith(HEAD)} != {f"{HEAD}weight"}:
        raise ConfigError(
            "model.path",
            f"got a {config.model_type}, whose sequence classification head is not {HEAD}weight "
            "alone; choose another architecture for the reward model",
        )
    values = json.loads((hf_dir / _CONFIG).read_text(encoding="utf-8"))
    pads = values.get("pad_token_id")
    values |= {
        "architectures": [type(model).__name__],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
        "pad_token_id": None if pads in last_tokens else pads,
    }
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (out_dir / _CONFIG).write_text(text, encoding="utf-8")


def write_score_model(
    tensors: Iterator[tuple[str, Tensor]],
    config_dir: Path,
    out_dir: Path,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Write a value model's weights; `CheckpointError` if its bias, which is dropped, is not 0."""
    write_model(_without_bias(tensors), config_dir, out_dir, dtype, max_shard_bytes)
    check_reward_model(out_dir, max_length=1)


def _without_bias(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if name != BIAS:
            yield name, tensor
        elif bool(tensor.any()):
            raise CheckpointError(f"{BIAS} is {tensor.tolist()}; need 0, at which it is trained")
