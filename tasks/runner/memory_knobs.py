"""Lists settings that would lower a stage's memory, in the order in which to try them.

Promises: only settings that the stage has and that can still save memory, each with a value or a
bound. LoRA, which changes what is trained, is the last of the training settings.
Does not promise: that one setting suffices.
"""

from engines.config.stages.base import StageConfig, TrainingStageConfig
from engines.config.stages.final import MergeStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import AnsweringStageConfig
from engines.config.training import TrainingConfig

SAMPLING_PHASES = frozenset({"gen", "evaluate"})
"""Phases of a clock or heartbeat in which the rollout engine uses the most memory."""
SWITCHES = ("gradient_checkpointing", "optimizer_offload", "param_offload", "activation_offload")


def memory_knobs(config: StageConfig, phase: str = "") -> list[str]:
    """Return settings to try, the best first; `phase` is where memory ran out, empty if unknown."""
    sampling = _sampling(config)
    training = _training(config.training) if isinstance(config, TrainingStageConfig) else []
    if isinstance(config, MergeStageConfig):
        return [_halved("merge.max_shard_bytes", config.max_shard_bytes)]
    return [*sampling, *training] if phase in SAMPLING_PHASES else [*training, *sampling]


def _sampling(config: StageConfig) -> list[str]:
    if not isinstance(config, RLRoundStageConfig | AnsweringStageConfig):
        return []
    rollout, knobs = config.rollout, []
    if rollout.max_num_sequences > 1:
        knobs.append(_halved("rollout.max_num_sequences", rollout.max_num_sequences))
    share = rollout.options.get("gpu_memory_utilization")
    if isinstance(share, float):
        knobs.append(f"rollout.options.gpu_memory_utilization: less than {share:g}")
    dtype = config.training.dtype if isinstance(config, RLRoundStageConfig) else config.dtype
    if (rollout.dtype or dtype) == "float32":
        knobs.append("rollout.dtype: bfloat16")
    return knobs


def _training(training: TrainingConfig) -> list[str]:
    knobs = []
    if training.max_tokens_per_micro_batch > 8:
        knobs.append(
            _halved("training.max_tokens_per_micro_batch", training.max_tokens_per_micro_batch)
        )
    knobs += [f"training.{name}: true" for name in SWITCHES if getattr(training, name) is not True]
    if not training.chunked_logprobs:
        knobs.append("training.chunked_logprobs: true")
    knobs.append(f"training.num_workers: more than {training.num_workers}, which share the model")
    if training.lora is None:
        knobs.append("training.lora: {rank: 16}, which trains an adapter alone")
    return knobs


def _halved(path: str, value: int) -> str:
    return f"{path}: {value // 2} instead of {value}"
