"""The model that is trained, loaded or made from scratch, and the models beside it.

`adapter_travels` decides if a sync sends only the adapter. Imports neither torch nor an engine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from engines.config.backends import backends_with
from engines.config.base import Execution, PathConfig, Refusals, StrictModel
from engines.config.plugins import ROLLOUT_ENGINES, engines_with
from engines.config.rollout import RolloutConfig, SamplingConfig
from engines.config.training import TrainingConfig
from infra.errors import refuse


class ArchitectureConfig(StrictModel):
    """The shape of a model made from scratch (`model.init: random`)."""

    model_type: str = "qwen3"
    """Any causal-LM architecture that transformers builds from a config (`qwen3`, `llama`, ...)."""
    hidden_size: int = Field(default=128, ge=8)
    num_layers: int = Field(default=2, ge=1)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=4)
    intermediate_size: int = Field(default=384, ge=8)
    tie_word_embeddings: bool = True
    rope_theta: float = Field(default=10_000.0, gt=0)

    def _refusals(self) -> Refusals:
        yield (
            self.num_heads % self.num_kv_heads,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
            "grouped attention needs whole groups",
        )


class TokenizerConfig(StrictModel):
    """The tokenizer trained on the data, for a model made from scratch."""

    kind: Literal["character", "bpe"] = "character"
    """`character`: one token per character, so digits never merge; `bpe` is byte-level."""
    vocab_size: int = Field(default=512, ge=16)
    """Upper bound for `bpe`; `character` uses exactly the characters that occur."""


class ModelConfig(PathConfig):
    """The model that the pipeline starts from."""

    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` loads `path`; `random` builds `architecture` and a tokenizer from the data."""
    path: str | None = None
    """A model directory or a hub id; required when `init` is `pretrained`."""
    revision: str | None = None
    """Commit, branch or tag of a hub id, resolved once by the plan; null: its default branch."""
    architecture: ArchitectureConfig = ArchitectureConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    max_length: int = Field(default=2048, ge=8)
    """Context in tokens, prompt and response together; at most what the model was built for."""
    chat_template: str | None = None
    """Jinja template that replaces the tokenizer's own; null keeps that."""

    @property
    def measured(self) -> "ModelConfig":
        """The model without the settings that only training needs; a random model is unchanged."""
        if self.init == "random":
            return self
        return ModelConfig(path=self.path, revision=self.revision, chat_template=self.chat_template)

    def _refusals(self) -> Refusals:
        yield (
            self.init == "pretrained" and not self.path,
            "path: missing; give a directory or a hub id, or set init: random",
        )
        yield (
            self.init == "random" and self.path,
            f"path: {self.path!r} contradicts init: random; remove one of the two",
        )


class NamedModelConfig(PathConfig):
    """A model beside the policy, which is not trained by the stages that read it."""

    path: str | None = None
    """A model directory or a hub id."""
    revision: str | None = None
    """Commit, branch or tag of a hub id, resolved once by the plan; null: its default branch."""


class JudgingModelConfig(NamedModelConfig):
    """A model that scores answers."""

    path: str | None = None
    """A model directory or a hub id; null (reward model only): the one that the recipe trains."""
    chat_template: str | None = None
    """Jinja template that replaces the tokenizer's own; null keeps that."""


class RewardModelConfig(JudgingModelConfig):
    """A sequence classification model with one output, which scores each answer."""

    max_length: int | None = Field(default=None, ge=8)
    """Limit in tokens of a prompt with an answer, in the model's own chat template; a longer sample
    gets no score. null: the model's context, at most 2,048 (also if it states none)."""


class JudgeConfig(JudgingModelConfig):
    """A language model that is asked about each answer; the recipe's rollout engine serves it."""

    max_length: int = Field(default=2048, ge=8)
    """Limit in tokens of question and reply, in the judge's chat template; above it: no score."""
    prompt: str = Field(min_length=1)
    """Jinja template of the question. Variables: `question` (last message of the prompt), `answer`
    (the policy's), and the row's `ground_truth`, `data_source` and `extra_info`."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0, max_new_tokens=64)
    """Sampling of the reply; temperature 0 is greedy."""
    num_replicas: Annotated[int, Execution] = Field(default=1, ge=1)
    """Number of engines, on devices of their own; just one if it runs inside the job's process."""
    options: dict[str, Any] = {}
    """Options of the rollout engine, instead of the recipe's."""

    def _refusals(self) -> Refusals:
        yield self.path is None, "path: missing; need a model directory or a hub id; set it"
        yield (
            self.sampling.max_new_tokens >= self.max_length,
            f"sampling.max_new_tokens: got {self.sampling.max_new_tokens}; need less than "
            f"max_length {self.max_length}, so that there is room for the question; lower it",
        )


STREAMS_ADAPTER = "adapter stream"
ADAPTERS = "adapters"


def adapter_travels(training: TrainingConfig, rollout: RolloutConfig) -> bool:
    """Return True if a sync sends only the adapter, False if it sends merged weights.

    Raises:
        ConfigError: `rollout.lora_sync` is `adapter`, and another setting rules that out.
    """
    if rollout.lora_sync == "merged":
        return False
    hindrance = _hindrance(training, rollout)
    refuse(
        hindrance is not None and rollout.lora_sync == "adapter",
        "rollout.lora_sync",
        f"got adapter, and {hindrance}; choose auto or merged",
    )
    return hindrance is None


def _hindrance(training: TrainingConfig, rollout: RolloutConfig) -> str | None:
    able = sorted(backends_with(STREAMS_ADAPTER))
    if training.lora is None:
        return "training.lora is null; need an adapter"
    if training.lora.use_dora:
        return "training.lora.use_dora is true; need an adapter without magnitudes"
    if training.backend not in able:
        return f"training.backend is {training.backend}; need one of {', '.join(able)}"
    if ADAPTERS not in ROLLOUT_ENGINES.place(rollout.engine).capabilities:
        engines = ", ".join(engines_with(ADAPTERS))
        return f"rollout.engine is {rollout.engine}; need one of {engines}"
    if rollout.placement == "colocated":
        return (
            "rollout.placement is colocated, where an engine discards the adapter's base "
            "weights at every sleep; need disaggregated"
        )
    return None
