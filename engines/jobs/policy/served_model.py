"""A policy or a model directory as rollout engines are given it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from engines.checkpoint.model_directory import check_model_directory
from engines.jobs.policy.files import HF_DIR, trained_steps
from engines.training.backends.merging import policy_weights


@dataclass(frozen=True)
class ServedModel:
    """What is served and not trained.

    Attributes:
        hf_dir: its configuration and tokenizer.
        weights: by hub name, streamed; called again for an engine that starts late.
        num_steps: trainer steps behind it; 0 of a model directory, which does not say.
    """

    hf_dir: Path
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    num_steps: int

    @property
    def context_length(self) -> int:
        """Tokens that the model was built for."""
        config = json.loads((self.hf_dir / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["max_position_embeddings"])


def served_policy(policy_dir: Path) -> ServedModel:
    """A `policy` artifact, read from its checkpoint whoever wrote it."""
    weights = partial(policy_weights, policy_dir)
    return ServedModel(policy_dir / HF_DIR, weights, trained_steps(policy_dir).num_steps)


def served_directory(model_dir: Path) -> ServedModel:
    """A Hugging Face directory; raises `ConfigError` where it is none."""
    check_model_directory(model_dir)
    return ServedModel(model_dir, partial(stored_tensors, model_dir), 0)


def stored_tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model directory, one at a time, by their names in the files."""
    for shard in sorted(model_dir.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
