"""A value model on disk as transformers' sequence classification model of one output.

Promises: the directory loads with `AutoModelForSequenceClassification` and gives a conversation
alone the score that the engine gives it; names of weights are compared before anything trains.
Does not promise batches: where what pads is also what ends a conversation, transformers would read
the score in front of it, so such a model is written without a token that pads, and reads one
conversation at a time.
"""

import json
import shutil
from collections.abc import Iterator, Set
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from engines.checkpoint.model_directory import check_reward_model
from engines.checkpoint.models.export import write_model
from engines.errors import CheckpointError
from infra.errors import ConfigError

HEAD = "score."
BIAS = f"{HEAD}bias"
"""What a value model's head has and a sequence classification model's lacks; held at 0."""
_CONFIG = "config.json"
_OF_WRITERS = "generation_config.json"


def write_score_config(hf_dir: Path, last_tokens: Set[int], out_dir: Path) -> None:
    """Configuration and tokenizer of the model to be.

    Args:
        hf_dir: configuration and tokenizer of the language model that it starts from.
        last_tokens: ids that end a conversation.
        out_dir: created; replaced if it exists.

    Raises:
        ConfigError: transformers has no such model of that architecture.
    """
    shutil.rmtree(out_dir, ignore_errors=True)
    shutil.copytree(hf_dir, out_dir, ignore=shutil.ignore_patterns(_OF_WRITERS))
    config = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False, num_labels=1)
    with torch.device("meta"):
        try:
            model = AutoModelForSequenceClassification.from_config(config)
        except ValueError:
            raise ConfigError(
                "model.path",
                f"got a {config.model_type}, of which transformers has no sequence classification "
                "model; need another architecture for a reward model; choose one",
            ) from None
    if {name for name, _ in model.named_parameters() if name.startswith(HEAD)} != {f"{HEAD}weight"}:
        raise ConfigError(
            "model.path",
            f"got a {config.model_type}, whose sequence classification model has no head {HEAD}"
            "weight alone; need another architecture for a reward model; choose one",
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
    """Write a value model's weights beside its configuration.

    Args:
        tensors: whole weights by hub name, the head among them.
        config_dir: of `write_score_config`.
        out_dir: created if needed; must not hold weights yet.
        dtype: of the written weights, `float32` or `bfloat16`.
        max_shard_bytes: of `write_model`.

    Raises:
        CheckpointError: the head's bias is not 0: no sequence classification model has one.
    """
    write_model(_without_bias(tensors), config_dir, out_dir, dtype, max_shard_bytes)
    check_reward_model(out_dir, max_length=1)


def _without_bias(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if name != BIAS:
            yield name, tensor
        elif bool(tensor.any()):
            raise CheckpointError(f"{BIAS} is {tensor.tolist()}; need 0, at which it is trained")
