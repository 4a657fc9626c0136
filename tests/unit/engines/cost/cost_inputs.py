"""Workloads of known models."""

from typing import Any

from engines.config.rollout import RolloutConfig
from engines.config.training import TrainingConfig
from engines.cost.machines import machine_of
from engines.cost.model_config import PUBLISHED_MODELS
from engines.cost.model_shape import ModelShape
from engines.cost.workload import RoleCost, SampledWork, Workload

QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
B8, B32, A3B = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B-Base"
H200 = machine_of("h200x1")
H100X8 = machine_of("h100x8")


def shape_of(model: str = "", *, values: bool = False) -> ModelShape:
    config = PUBLISHED_MODELS[model] if model else QWEN3_06B
    return ModelShape.from_config(config, values=values)


def training_of(**settings: Any) -> TrainingConfig:
    plain = {"dtype": "bfloat16", "gradient_checkpointing": False}
    return TrainingConfig.model_validate({**plain, **settings})


def work_of(
    shape: ModelShape, training: TrainingConfig, *more: RoleCost, num_tokens: int = 2**20
) -> Workload:
    """A step that trains one model on sequences of 1,024 tokens."""
    policy = RoleCost("policy", shape, num_trained=1, lora=training.lora)
    return Workload(
        roles=(policy, *more),
        training=training,
        num_sequences=num_tokens // 1024,
        sequence_tokens=1024,
        unit_tokens=1024,
    )


def sampled_of(
    shape: ModelShape, *, prompt: int = 128, answer: int = 512, count: int | None = 256,
    sync: int = 0, **rollout: Any,
) -> SampledWork:  # fmt: skip
    settings = RolloutConfig.model_validate(rollout)
    return SampledWork(shape, settings, "bfloat16", prompt, answer, count, sync)
