"""The parallel layout of a Megatron engine and its checks, without Megatron-Core."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from engines.config.training import TrainingConfig
from infra.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; the rest of the ranks is data-parallel.

    Experts are divided over `expert` ranks of the same stage. `sequence_parallel` shards the
    activations between tensor-parallel matrices along the tokens.
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
        """Number of pieces into which the layers are divided."""
        return self.pipeline * self.virtual

    @property
    def tokens_multiple(self) -> int:
        """Number by which the tokens of one context rank have to be divisible."""
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
    name = "virtual_pipeline" if layout.virtual > 1 else "pipeline"
    for holds, setting, problem in (
        (
            world_size % model_parallel == 0,
            "num_workers",
            f"got {world_size}; need a multiple of {model_parallel} "
            "(tensor x pipeline x context parallel size)",
        ),
        (
            world_size % (layout.pipeline * layout.expert) == 0,
            "expert_parallel_size",
            f"got {layout.expert}; need a divisor of the {world_size // layout.pipeline} ranks of "
            "a pipeline stage",
        ),
        (
            layout.virtual == 1 or layout.pipeline > 1,
            "virtual_pipeline_parallel_size",
            f"got {layout.virtual} with one pipeline stage; set it to 1, or "
            "training.pipeline_parallel_size to 2 or more",
        ),
        (
            config.num_hidden_layers % layout.num_chunks == 0,
            f"{name}_parallel_size",
            f"got {layout.virtual if layout.virtual > 1 else layout.pipeline}; the "
            f"{config.num_hidden_layers} layers do not divide over {layout.num_chunks} pieces",
        ),
        *_widths(layout, config),
    ):
        if not holds:
            raise ConfigError(f"training.{setting}", problem)


def _widths(layout: Layout, config: PretrainedConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield (fits the model, setting, problem if not) for each setting that cuts a layer."""
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        size = getattr(config, name)
        problem = f"got {layout.tensor}; need a divisor of the model's {name}, {size}"
        yield size % layout.tensor == 0, "tensor_parallel_size", problem
    heads = config.num_attention_heads // layout.tensor
    kv_heads = config.num_key_value_heads // layout.tensor
    size = layout.context
    yield (
        heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0),
        "context_parallel_size",
        f"got {size}; need a divisor of the {heads} attention heads of a tensor-parallel rank, and "
        f"a divisor or multiple of its {kv_heads} key-value heads",
    )
    num_experts = getattr(config, "num_experts", None) or 0
    problem = (
        f"got {layout.expert}; need a divisor of the model's {num_experts} experts"
        if num_experts
        else f"got {layout.expert}; {config.model_type} has no experts; set it to 1"
    )
    is_divided = num_experts > 0 and num_experts % layout.expert == 0
    yield layout.expert == 1 or is_divided, "expert_parallel_size", problem
    yield (
        not num_experts or layout.tensor == 1 or layout.sequence_parallel,
        "sequence_parallel",
        "got false; experts with tensor parallelism need it; set it to true",
    )
