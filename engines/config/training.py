"""The training backend, its parallel layout, the optimizer, the adapter, and what saves memory."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engines.config.base import Execution, NotIdentity, StrictModel
from infra.errors import ConfigError


class EmaConfig(StrictModel):
    """An exponential moving average of the trained weights: what the stage commits in their place.

    It is held in float32, on each rank for its own part. Training and sampling go by the weights
    themselves, which end with the stage; what comes behind it continues from the average.
    """

    decay: float = Field(default=0.999, gt=0, lt=1)
    """Decay: the part of the average that each optimizer step keeps."""
    use_warmup: bool = True
    """The decay of step t is at most (1 + t) / (10 + t), as in TensorFlow: a stage of few steps
    forgets the weights that it starts with."""


class OptimizerConfig(StrictModel):
    """AdamW and its schedule. One step is one optimizer step."""

    lr: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    num_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final rate of the cosine schedule as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    ema: EmaConfig | None = None
    """Commit a moving average of the weights; 4 bytes for each weight that is trained. null: commit
    the weights."""

    @model_validator(mode="after")
    def _check_betas(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: got {self.betas}; need two numbers in [0, 1)")
        return self


class LoraConfig(StrictModel):
    """A low-rank adapter (arXiv:2106.09685): only it is trained, the base weights are frozen.

    It has no dropout: training and sampling must see the same log-probabilities.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of linear modules (`q_proj`); `all-linear` is every one but the output head."""
    use_dora: bool = False
    """Also train the magnitude of each row (arXiv:2402.09353)."""


_SIZES = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "ulysses_size",
    "replicate_size",
)  # fmt: skip
"""Settings whose product divides the ranks; experts live inside the data-parallel ones."""


class TrainingConfig(StrictModel):
    """Backend, layout and numerics of every training stage."""

    backend: str = "fsdp2"
    """Name of a training backend (`rlhf engines`); a backend's own switches stand in `options`."""
    num_workers: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks of the training group; as many as the layout needs when it is not given. 1 runs inside
    the job's process, without Ray actors."""
    tensor_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    sequence_parallel: Annotated[bool, Execution] = True
    """With tensor parallelism: also shard activations between the matrices along the tokens."""
    pipeline_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that hold consecutive layers."""
    virtual_pipeline_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Pieces of each pipeline rank; above 1 interleaves them."""
    context_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence, in Megatron-Core's way."""
    ulysses_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence, with all-to-all around attention."""
    expert_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share the experts of a mixture."""
    replicate_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Hybrid sharding: copies of the sharded model; 1 shards over all ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and the optimizer stay float32."""
    max_tokens_per_micro_batch: Annotated[int, Execution] = Field(default=16_384, ge=8)
    """Token budget of one forward and backward pass on one rank: the only memory knob."""
    gradient_checkpointing: Annotated[bool, Execution] = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    activation_offload: Annotated[bool, Execution] = False
    """Keep the activations that the backward pass needs in host memory."""
    param_offload: Annotated[bool, Execution] = False
    """Keep parameters and gradients in host memory while the engine is idle."""
    optimizer_offload: Annotated[bool, Execution] = False
    """Keep the optimizer's state in host memory outside of optimizer steps."""
    chunked_logprobs: Annotated[bool, Execution] = True
    """Never hold logits of all tokens at once: memory does not grow with tokens x vocabulary."""
    frozen_parameters: tuple[str, ...] = ()
    """Patterns of parameter names that are not trained, as in a shell (`model.embed_tokens.*`)."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights."""
    use_torch_compile: Annotated[bool, Execution] = False
    """Compile each decoder layer; the first steps are slow."""
    torch_compile_backend: Annotated[Literal["inductor", "aot_eager", "cudagraphs"], Execution] = (
        "inductor"
    )
    """`aot_eager` makes the graphs and runs them as they are: to find out what compiles."""
    use_liger: Annotated[bool, Execution] = False
    """Fused kernels for norms and gated feed-forward layers; needs a GPU and liger-kernel."""
    num_threads: Annotated[int, Execution] = Field(default=1, ge=1)
    """CPU threads of one rank. They change the order of sums and so the last digits: the machine's
    cores are never counted."""
    collective_timeout_s: Annotated[float, NotIdentity] = Field(default=600.0, gt=0)
    options: dict[str, Any] = {}
    """Options of the chosen backend, validated by the backend's own schema in preflight."""

    @model_validator(mode="before")
    @classmethod
    def _fill_num_workers(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "num_workers" in values:
            return values
        sizes = [values.get(name, 1) for name in _SIZES]
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            return values  # the fields say what is wrong
        return {**values, "num_workers": math.prod(sizes)}

    @model_validator(mode="after")
    def _check_layout(self) -> "TrainingConfig":
        sizes = {name: getattr(self, name) for name in _SIZES}
        asked = {name: size for name, size in sizes.items() if size > 1}
        product = math.prod(asked.values())
        if self.num_workers % product:
            parts = " x ".join(f"{name} {size}" for name, size in asked.items())
            raise ValueError(
                f"num_workers: got {self.num_workers}; need a multiple of {product} ({parts}); "
                f"use {product * max(1, round(self.num_workers / product))}"
            )
        return self

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or sets of ranks, that hold different data."""
        model_parallel = (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
            * self.ulysses_size
        )
        return self.num_workers // model_parallel

    @property
    def num_sharing_ranks(self) -> int:
        """Ranks that share the tokens of a sequence."""
        return self.ulysses_size * self.context_parallel_size

    @property
    def shared_tokens_per_micro_batch(self) -> int:
        """Tokens of a micro-batch: the budget of each rank that shares its sequences."""
        return self.max_tokens_per_micro_batch * self.num_sharing_ranks

    def check_unit(self, num_tokens: int, what: str) -> None:
        """Refuse what no micro-batch has room for, before a step comes to it.

        Args:
            num_tokens: of sequences that stay in one micro-batch.
            what: they are, for the error line.

        Raises:
            ConfigError: they exceed `shared_tokens_per_micro_batch`.
        """
        if num_tokens <= self.shared_tokens_per_micro_batch:
            return
        num = self.num_sharing_ranks
        each = f" on each of {num} ranks that share sequences" if num > 1 else ""
        raise ConfigError(
            "training.max_tokens_per_micro_batch",
            f"got {self.max_tokens_per_micro_batch}{each}; need {-(-num_tokens // num)}, for "
            f"{num_tokens} tokens of {what}, which no micro-batch cuts; raise it",
        )


class HardwareConfig(StrictModel):
    """The accelerator that jobs run on."""

    platform: Annotated[str, Execution] = "auto"
    """`auto` probes in a stated order and says what it chose; a name is an order, never a hint."""
    device_kind: Annotated[str | None, Execution] = None
    """Product name of the devices, of a CPU its architecture; null asks this machine. Jobs refuse
    to start on another."""
    queue_timeout_s: Annotated[float, NotIdentity] = Field(default=604_800.0, gt=0)
    """How long a stage waits until other runs leave its ranks and replicas room on the cluster."""
