"""Job `reward_model`: trains a sequence classification model with one output on pairs.

It starts from a policy's weights if one is given, with a head of zeros. The head's bias stays 0:
comparisons do not depend on it, and transformers' models have none.

Promises: the result loads with `AutoModelForSequenceClassification` and gives a single conversation
the engine's score; the head's name is checked before training starts.
Does not promise batches: a padding token that also ends conversations is removed.
"""

import json
import shutil
from collections.abc import Iterator, Set
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from engines.algorithms.parts import options_as
from engines.algorithms.preference.options import RewardModelOptions
from engines.checkpoint.export import write_model
from engines.checkpoint.model_directory import check_reward_model
from engines.config.options import own_options
from engines.config.rows import BRADLEY_TERRY
from engines.config.stages.supervised import RewardModelStageConfig
from engines.controller.model_worker import role_checkpoint
from engines.data.read.examples import as_reward_model, read_pairs
from engines.errors import CheckpointError
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.supervised_stage import start_of, train, training_pairs
from engines.trainers.supervised.preference import RewardPairs
from engines.training.backends.merging import checkpoint_weights, exported_policy
from engines.training.spec import REWARD, VALUE_HEAD, RoleSpec
from infra.errors import ConfigError

KIND = "reward_model"
BIAS = f"{VALUE_HEAD}bias"
"""Bias of a value model's head, which a sequence classification model lacks; held at 0."""
_CONFIG = "config.json"


def reward_model(context: JobContext[RewardModelStageConfig]) -> JobOutput:
    """Train a reward model on preference pairs."""
    config, section = context.config, context.config.reward_model
    config_dir = context.attempt_dir / KIND
    with ExitStack() as stack:
        with context.clock("load"):
            start = start_of(context)
            tokenizer, limit = start.tokenizer, config.model.max_length
            held_out = start.dataset.preference_evaluation_rows()
            pairs = read_pairs(training_pairs(start), tokenizer, limit, as_reward_model)
            options = own_options(section.options, BRADLEY_TERRY, "reward_model.options")
            rows = RewardPairs(
                section,
                options_as(RewardModelOptions, options),
                pairs,
                read_pairs(held_out, tokenizer, limit, as_reward_model),
            )
            last = {side.input_ids[-1] for p in pairs for side in (p.chosen, p.rejected)}
            write_score_config(start.hf_dir, last, config_dir)
            before, source = context.optional_input("policy"), start.source
            if before is not None:
                source = exported_policy(
                    before, context.attempt_dir / "initial_reward_model", config.max_shard_bytes
                )
            frozen = (*config.training.frozen_parameters, BIAS)
            role = RoleSpec(
                source=source,
                training=config.training.model_copy(update={"frozen_parameters": frozen}),
                optimizer=section.optimizer,
                model_type="value_model",
                total_num_steps=section.num_steps,
            )
        progress, trained = train(
            context, stack, section, section.batch_size_pairs, rows, start, {REWARD: role}
        )
        with context.clock("save"):
            checkpoint = role_checkpoint(progress.last_checkpoint(), REWARD)
            write_score_model(
                checkpoint_weights(checkpoint, config_dir),
                config_dir,
                context.output_dir,
                "float32",
                config.max_shard_bytes,
            )
        return JobOutput(KIND, {"num_steps": float(trained.num_steps), **trained.metrics})


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
    heads = [name for name, _ in model.named_parameters() if name.startswith(VALUE_HEAD)]
    if heads != [f"{VALUE_HEAD}weight"]:
        raise ConfigError(
            "model.path",
            f"got a {config.model_type}, whose sequence classification head is not "
            f"{VALUE_HEAD}weight alone; choose another architecture for the reward model",
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


if __name__ == "__main__":
    run_job(RewardModelStageConfig, reward_model)
