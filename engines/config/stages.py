"""The resolved configuration of each stage: exactly what enters its fingerprint.

A value that must not re-run a stage when it changes (the number of rounds still to come, a
time-out, a number of threads) does not belong here; see `Runtime`.
"""

from typing import Literal

from pydantic import Field, model_validator

from engines.config.algorithm import AlgorithmConfig, MismatchConfig, RewardConfig
from engines.config.base import StrictModel
from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.config.rollout import RolloutConfig, SamplingConfig
from engines.config.training import OptimizerConfig, TrainingConfig


class CheckpointConfig(StrictModel):
    """Step checkpoints inside a stage."""

    every_num_steps: int = Field(default=50, ge=1)
    num_keep: int = Field(default=2, ge=2)
    """Kept newest checkpoints; never below 2, the newest may be the one being written."""
    async_save: bool = False
    """Copy the state to host memory and write it while training goes on."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Deadline of writing one checkpoint in the background."""


class SFTConfig(StrictModel):
    """Supervised fine-tuning."""

    num_steps: int = Field(default=200, ge=1)
    batch_size_sequences: int = Field(default=128, ge=1)
    """Sequences of one optimizer step, over all ranks."""
    target_loss: float | None = Field(default=None, gt=0)
    """Stop early once the moving average of the training loss reaches this; null runs all steps."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5, schedule="cosine")


class RLConfig(StrictModel):
    """Iterative RL; one round is one stage."""

    num_rounds: int = Field(default=1, ge=0)
    num_steps_per_round: int = Field(default=20, ge=1)
    """RL steps of a round: generate, score, train, publish."""
    batch_size_prompts: int = Field(default=32, ge=1)
    """Prompts of one RL step."""
    group_size: int = Field(default=8, ge=1)
    """Samples per prompt."""
    mini_batch_size_prompts: int | None = Field(default=None, ge=1)
    """Prompts of one optimizer step; null trains on the whole batch at once."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    sampling: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    mismatch: MismatchConfig = MismatchConfig()
    max_num_skipped_steps: int = Field(default=10, ge=0)
    """Steps in a row that may have nothing to train on; one more stops the run."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "RLConfig":
        mini = self.mini_batch_size_prompts
        if mini and self.batch_size_prompts % mini:
            raise ValueError(
                f"batch_size_prompts: {self.batch_size_prompts} is not a multiple of "
                f"mini_batch_size_prompts {mini}; make it one"
            )
        return self


class EvaluationConfig(StrictModel):
    """Held-out evaluation: greedy pass@1 and, when asked, sampled pass@k."""

    num_problems: int | None = Field(default=None, ge=1)
    """null takes every evaluation row."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """null uses `rl.sampling.max_new_tokens`."""
    num_samples: int = Field(default=0, ge=0)
    """Samples per problem for pass@k; 0 skips the sampled part."""
    pass_at: tuple[int, ...] = (1,)
    """Values of k; each at most `num_samples`."""
    temperature: float = Field(default=1.0, gt=0)
    confidence: float = Field(default=0.95, gt=0, lt=1)

    @model_validator(mode="after")
    def _check_k(self) -> "EvaluationConfig":
        if self.num_samples and max(self.pass_at, default=0) > self.num_samples:
            raise ValueError(
                f"pass_at: got {max(self.pass_at)}; need at most num_samples {self.num_samples}"
            )
        return self


class PromoteConfig(StrictModel):
    """The gate in front of the model registry."""

    model_name: str = "policy"
    """Name of the registered model in MLflow."""
    alias: str = "champion"
    metric: str = "accuracy"
    min_value: float = Field(default=0.0)
    """The metric of the final evaluation must reach this, else nothing is promoted."""


class Runtime(StrictModel):
    """What a job needs to run but that cannot change its output; outside the fingerprint."""

    platform: str = "auto"
    num_threads: int | None = None
    heartbeat_s: float = Field(default=2.0, gt=0)


class PreprocessStageConfig(StrictModel):
    """Stage `preprocess`: raw data to rows, and the tokenizer of a model made from scratch."""

    stage: Literal["preprocess"] = "preprocess"
    data: DataConfig
    model: ModelConfig


class SFTStageConfig(StrictModel):
    """Stage `sft`: dataset to policy checkpoint."""

    stage: Literal["sft"] = "sft"
    model: ModelConfig
    training: TrainingConfig
    sft: SFTConfig
    checkpoint: CheckpointConfig
    rollout: RolloutConfig
    reward: RewardConfig
    evaluation: EvaluationConfig
    """Scored at the end of the stage, so that the gain of RL can be told."""


class RLRoundStageConfig(StrictModel):
    """Stage `rl_round`: policy checkpoint to policy checkpoint.

    Holds the round's number and not the number of rounds: adding a round re-runs none.
    """

    stage: Literal["rl_round"] = "rl_round"
    round: int = Field(ge=1)
    model: ModelConfig
    training: TrainingConfig
    rollout: RolloutConfig
    num_steps: int = Field(ge=1)
    batch_size_prompts: int = Field(ge=1)
    group_size: int = Field(ge=1)
    mini_batch_size_prompts: int = Field(ge=1)
    num_epochs: int = Field(ge=1)
    sampling: SamplingConfig
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    reward: RewardConfig
    mismatch: MismatchConfig
    max_num_skipped_steps: int = Field(ge=0)
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig


class MergeStageConfig(StrictModel):
    """Stage `merge`: sharded policy checkpoint to a Hugging Face safetensors directory."""

    stage: Literal["merge"] = "merge"
    model: ModelConfig
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    adapter_only: bool = False
    """Write the low-rank adapter alone, as PEFT loads it, instead of whole weights."""


class EvaluateStageConfig(StrictModel):
    """Stage `evaluate`: merged model and evaluation rows to scores."""

    stage: Literal["evaluate"] = "evaluate"
    evaluation: EvaluationConfig
    rollout: RolloutConfig
    reward: RewardConfig


class PromoteStageConfig(StrictModel):
    """Stage `promote`: final scores to a decision."""

    stage: Literal["promote"] = "promote"
    promote: PromoteConfig
