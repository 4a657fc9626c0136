"""The parallel layout of a Megatron engine and its checks, without Megatron-Core."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from engines.config.training import TrainingConfig
from infra.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; the rest of the ranks is data-parallel.

    `expert` ranks lie inside the other dimensions. `sequence_parallel` shards activations
    between the matrices along the tokens.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False

    @staticmethod
    def from_config(training: TrainingConfig) -> "Layout":
        """Return the layout of a configuration."""
        return Layout(
            training.tensor_parallel_size,
            training.pipeline_parallel_size,
            training.virtual_pipeline_parallel_size,
            training.context_parallel_size,
            training.expert_parallel_size,
            training.sequence_parallel and training.tensor_parallel_size > 1,
        )

    @property
    def num_chunks(self) -> int:
        """Number of pieces of the layers."""
        return self.pipeline * self.virtual

    @property
    def tokens_multiple(self) -> int:
        """Divisor of the number of tokens of one context rank."""
        return self.tensor if self.sequence_parallel else 1

    def padded_vocabulary(self, size: int) -> int:
        """Return the embedding rows, padded to a multiple of the tensor-parallel ranks."""
        return -(-size // self.tensor) * self.tensor


def check_layout(layout: Layout, config: PretrainedConfig, world_size: int) -> None:
    """Refuse a layout that does not divide the ranks of the engine or the model.

    Raises:
        ConfigError: names the setting.
    """
    model_parallel = layout.tensor * layout.pipeline * layout.context
    _require(
        world_size % model_parallel == 0,
        "training.num_workers",
        f"got {world_size}; need a multiple of {model_parallel} "
        "(tensor x pipeline x context parallel size)",
    )
    _require(
        world_size % (layout.pipeline * layout.expert) == 0,
        "training.expert_parallel_size",
        f"got {layout.expert}; need a divisor of the {world_size // layout.pipeline} ranks of a "
        "pipeline stage",
    )
    _require(
        layout.virtual == 1 or layout.pipeline > 1,
        "training.virtual_pipeline_parallel_size",
        f"got {layout.virtual} with one pipeline stage; set it to 1, or "
        "training.pipeline_parallel_size to 2 or more",
    )
    name = "virtual_pipeline" if layout.virtual > 1 else "pipeline"
    _require(
        config.num_hidden_layers % layout.num_chunks == 0,
        f"training.{name}_parallel_size",
        f"got {layout.virtual if layout.virtual > 1 else layout.pipeline}; the "
        f"{config.num_hidden_layers} layers do not divide over {layout.num_chunks} pieces",
    )
    _check_heads(layout, config)
    _check_experts(layout, config)


def _check_heads(layout: Layout, config: PretrainedConfig) -> None:
    sizes = {"intermediate_size": config.intermediate_size,
             "num_attention_heads": config.num_attention_heads,
             "num_key_value_heads": config.num_key_value_heads}  # fmt: skip
    for name, size in sizes.items():
        _require(
            size % layout.tensor == 0,
            "training.tensor_parallel_size",
            f"got {layout.tensor}; need a divisor of the model's {name}, {size}",
        )
    heads = config.num_attention_heads // layout.tensor
    kv_heads = config.num_key_value_heads // layout.tensor
    size = layout.context
    _require(
        heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0),
        "training.context_parallel_size",
        f"got {size}; need a divisor of the {heads} attention heads of a tensor-parallel rank, and "
        f"a divisor or multiple of its {kv_heads} key-value heads",
    )


def _check_experts(layout: Layout, config: PretrainedConfig) -> None:
    num_experts = getattr(config, "num_experts", None) or 0
    if layout.expert > 1:
        _require(
            num_experts % layout.expert == 0 and num_experts > 0,
            "training.expert_parallel_size",
            f"got {layout.expert}; need a divisor of the model's {num_experts} experts"
            if num_experts
            else f"got {layout.expert}; {config.model_type} has no experts; set it to 1",
        )
    _require(
        not num_experts or layout.tensor == 1 or layout.sequence_parallel,
        "training.sequence_parallel",
        "got false; experts with tensor parallelism need it; set it to true",
    )


def _require(holds: bool, setting: str, problem: str) -> None:
    if not holds:
        raise ConfigError(setting, problem)
