"""The training backend, its parallel layout, optimizer, adapter and memory settings."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engines.config.backends import BACKENDS, backends_with, excluded_by
from engines.config.base import Execution, NotIdentity, Refusals, StrictModel
from hardware.detection import create
from infra.errors import ConfigError


class EmaConfig(StrictModel):
    """An exponential moving average of the trained weights, committed instead of them.

    It is held in float32, sharded like the weights. Training and sampling use the weights, which
    the stage does not keep; later stages continue from the average.
    """

    decay: float = Field(default=0.999, gt=0, lt=1)
    """Part of the average that each optimizer step keeps."""
    use_warmup: bool = True
    """Limit the decay at step t to (1 + t) / (10 + t); so short stages forget the initial weights.
    """


class OptimizerConfig(StrictModel):
    """AdamW and its schedule; a step is an optimizer step."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    num_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from near 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the cosine schedule as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    ema: EmaConfig | None = None
    """Commit a moving average of the weights (4 bytes per trained weight); null: the weights."""

    def _refusals(self) -> Refusals:
        yield (
            not all(0 <= beta < 1 for beta in self.betas),
            f"betas: got {self.betas}; need two numbers in [0, 1)",
        )


class LoraConfig(StrictModel):
    """A low-rank adapter (arXiv:2106.09685): only it trains, the base weights are frozen.

    It has no dropout: training and sampling must see the same logprobs.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of linear modules (`q_proj`); `all-linear` means all except the output head."""
    use_dora: bool = False
    """Also train the magnitude of each row (arXiv:2402.09353)."""


_SIZES = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "ulysses_size",
    "replicate_size",
)  # fmt: skip
"""Settings whose product must divide the ranks; experts lie inside the data-parallel ranks."""


class TrainingConfig(StrictModel):
    """Backend, layout and numerics of every training stage."""

    backend: str = "fsdp2"
    """Name of a training backend (`rlhf engines`); its own switches are in `options`."""
    num_workers: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks; by default as many as the layout needs. 1 runs inside the job, without Ray actors."""
    tensor_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    sequence_parallel: Annotated[bool, Execution] = True
    """With tensor parallelism: also shard the activations between layers along the tokens."""
    pipeline_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that hold consecutive layers."""
    virtual_pipeline_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Model chunks per pipeline rank; more than 1 interleaves them."""
    context_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence, with Megatron-Core's context parallelism."""
    ulysses_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence, with all-to-all around attention."""
    expert_parallel_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Ranks that share the experts of a mixture-of-experts model."""
    replicate_size: Annotated[int, Execution] = Field(default=1, ge=1)
    """Hybrid sharding: replicas of the sharded model; 1 shards over all ranks."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; `auto`: bfloat16 on accelerators, float32 on a CPU. Master weights and the
    optimizer's state stay float32; accelerators hold weights that do not train in this dtype."""
    max_tokens_per_micro_batch: Annotated[int, Execution] = Field(default=16_384, ge=8)
    """Token budget of one forward and backward pass on one rank: the main memory setting."""
    gradient_checkpointing: Annotated[bool | Literal["auto"], Execution] = "auto"
    """Recompute each layer in the backward pass instead of keeping its activations; `auto`: on
    accelerators, unless the plan finds room for the activations."""
    activation_offload: Annotated[bool, Execution] = False
    """Keep the activations that the backward pass needs in host memory."""
    param_offload: Annotated[bool, Execution] = False
    """Keep parameters and gradients in host memory while the engine is idle."""
    optimizer_offload: Annotated[bool, Execution] = False
    """Keep the optimizer state in host memory outside of optimizer steps."""
    chunked_logprobs: Annotated[bool, Execution] = True
    """Never hold all logits at once, so that memory does not grow with tokens x vocabulary."""
    frozen_parameters: tuple[str, ...] = ()
    """Shell-style patterns of parameter names that are not trained (`model.embed_tokens.*`)."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights; null: train the weights."""
    use_torch_compile: Annotated[bool | Literal["auto"], Execution] = "auto"
    """Compile each decoder layer; the first steps are slow. `auto`: on accelerators with Triton and
    a C compiler, if the backend can, and without `lora.use_dora` and `ulysses_size`."""
    torch_compile_backend: Annotated[Literal["inductor", "aot_eager", "cudagraphs"], Execution] = (
        "inductor"
    )
    """`aot_eager` builds the graphs and runs them unoptimized, to find out what compiles."""
    use_liger: Annotated[bool, Execution] = False
    """Fused kernels for norms and gated feed-forward layers; needs a GPU and liger-kernel."""
    num_threads: Annotated[int, Execution] = Field(default=1, ge=1)
    """CPU threads of one rank; not taken from the machine, as it changes the rounding of sums.
    """
    collective_timeout_s: Annotated[float, NotIdentity] = Field(default=600.0, gt=0)
    """Timeout of a collective operation in seconds."""
    memory_audit: Annotated[bool, NotIdentity] = False
    """Count what holds rank 0's memory in each phase, and report it with each step (`memory/*`);
    slows steps."""
    options: dict[str, Any] = {}
    """Options of the backend, validated by its own schema in preflight."""

    @model_validator(mode="before")
    @classmethod
    def _fill_num_workers(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "num_workers" in values:
            return values
        sizes = [values.get(name, 1) for name in _SIZES]
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            return values  # the fields say what is wrong
        return {**values, "num_workers": math.prod(sizes)}

    def _refusals(self) -> Refusals:
        asked = {name: getattr(self, name) for name in _SIZES if getattr(self, name) > 1}
        product = math.prod(asked.values())
        parts = " x ".join(f"{name} {size}" for name, size in asked.items())
        yield (
            self.num_workers % product,
            f"num_workers: got {self.num_workers}; need a multiple of {product} ({parts}); "
            f"use {product * max(1, round(self.num_workers / product))}",
        )

    def on(self, *, accelerator: bool, has_compiler: bool = True) -> "TrainingConfig":
        """Return it without `auto`; `has_compiler`: there are Triton and a C compiler."""
        chosen: dict[str, Any] = {}
        if self.dtype == "auto":
            chosen["dtype"] = "bfloat16" if accelerator else "float32"
        if self.gradient_checkpointing == "auto":
            chosen["gradient_checkpointing"] = accelerator
        if self.use_torch_compile == "auto":
            chosen["use_torch_compile"] = (
                accelerator and has_compiler and self.compile_hindrance is None
            )
        return self.model_copy(update=chosen) if chosen else self

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """`dtype`; `auto`, which preflight replaces, counts as float32."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def recomputes_layers(self) -> bool:
        """`gradient_checkpointing`; `auto`, which preflight replaces, counts as False."""
        return self.gradient_checkpointing is True

    @property
    def compile_hindrance(self) -> str | None:
        """Why `use_torch_compile: auto` is off on every device; None if it is not."""
        if self.backend not in backends_with("compile"):
            return f"{self.backend} compiles no layers"
        if self.lora is not None and self.lora.use_dora:
            return "training.lora.use_dora breaks each layer into many graphs"
        if self.ulysses_size > 1:
            return "with training.ulysses_size ranks exchange tokens inside a layer"
        return None

    @property
    def compiles_layers(self) -> bool:
        """`use_torch_compile`; `auto`, which preflight replaces, counts as False."""
        return self.use_torch_compile is True

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that process different data."""
        return self.num_workers // (
            self.tensor_parallel_size * self.pipeline_parallel_size * self.num_sharing_ranks
        )

    @property
    def num_sharing_ranks(self) -> int:
        """Ranks that share the tokens of a sequence."""
        return self.ulysses_size * self.context_parallel_size

    @property
    def shared_tokens_per_micro_batch(self) -> int:
        """Tokens of a micro-batch over all ranks that share its sequences."""
        return self.max_tokens_per_micro_batch * self.num_sharing_ranks

    def check_unit(self, num_tokens: int, what: str) -> None:
        """Refuse sequences (`what`) that do not fit in one micro-batch; raises `ConfigError`."""
        if num_tokens > self.shared_tokens_per_micro_batch:
            num = self.num_sharing_ranks
            each = f" on each of {num} ranks that share sequences" if num > 1 else ""
            raise ConfigError(
                "training.max_tokens_per_micro_batch",
                f"got {self.max_tokens_per_micro_batch}{each}; need {-(-num_tokens // num)}, for "
                f"{num_tokens} tokens of {what}, which no micro-batch cuts; raise it",
            )


_LAYOUT_FIELDS = {
    "hybrid": "replicate_size",
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "virtual pipeline": "virtual_pipeline_parallel_size",
    "context": "context_parallel_size",
    "ulysses": "ulysses_size",
    "expert": "expert_parallel_size",
}
"""Dimension of parallelism -> setting under `training.`; `data` needs none."""
_FEATURE_FIELDS = {"lora": "lora", "compile": "use_torch_compile", "liger": "use_liger"}
"""Feature -> setting under `training.`; the others depend on the model."""


def check_layout(training: TrainingConfig) -> None:
    """Refuse a layout or feature that the built-in backend lacks; raises `ConfigError`."""
    backend = BACKENDS.get(training.backend)
    if backend is None:
        return
    sizes = {each: getattr(training, setting) for each, setting in _LAYOUT_FIELDS.items()}
    for dimension, size in sizes.items():
        if size > 1 and dimension not in backend.parallelism:
            able = [name for name, other in BACKENDS.items() if dimension in other.parallelism]
            raise ConfigError(
                f"training.{_LAYOUT_FIELDS[dimension]}",
                f"got {size}; {training.backend} has no {dimension} parallelism; set it to 1, or "
                f"training.backend to {' or '.join(able) or 'a plugin that has it'}",
            )
    asked = {name: getattr(training, setting) for name, setting in _FEATURE_FIELDS.items()}
    features = {name for name, value in asked.items() if value and value != "auto"}
    for feature in sorted(features - backend.features.keys()):
        raise ConfigError(
            f"training.{_FEATURE_FIELDS[feature]}",
            f"{training.backend} has no {feature}; remove it, or set training.backend to "
            f"{' or '.join(backends_with(feature))}",
        )
    used = features | {dimension for dimension, size in sizes.items() if size > 1}
    for first in sorted(used & excluded_by(training.backend, used)):
        raise ConfigError(
            f"training.{_LAYOUT_FIELDS.get(first, first)}",
            f"{training.backend} has no {first} together with "
            f"{' and '.join(sorted(used & excluded_by(training.backend, {first})))}; "
            "leave one of them out, or choose another training.backend",
        )


class HardwareConfig(StrictModel):
    """The accelerator that jobs run on."""

    platform: Annotated[str, Execution] = "auto"
    """`auto` probes in a documented order and reports its choice; a name requires that platform."""
    device_kind: Annotated[str | None, Execution] = None
    """Product name of the devices (CPU: architecture) that jobs require; null: this machine's."""
    queue_timeout_s: Annotated[float, NotIdentity] = Field(default=604_800.0, gt=0)
    """Seconds that a stage waits until the cluster has room for its ranks and replicas."""

    @property
    def is_accelerator(self) -> bool:
        """True if the platform is not the host's processor; False for an unresolved `auto`."""
        return self.platform != "auto" and create(self.platform).is_accelerator
