"""The training backend, the optimizer, and how a batch is cut into micro-batches."""

from typing import Any, Literal

from pydantic import Field, model_validator

from engines.config.base import StrictModel


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

    @model_validator(mode="after")
    def _check_betas(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: got {self.betas}; need two numbers in [0, 1)")
        return self


class TrainingConfig(StrictModel):
    """What every training stage shares: the backend and its numerics."""

    backend: str = "fsdp2"
    """Name in the EngineRegistry; a backend's own switches stand in `options`."""
    num_workers: int = Field(default=1, ge=1)
    """Ranks of the training group. 1 runs inside the job's process, without Ray actors."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and the optimizer stay float32."""
    max_tokens_per_micro_batch: int = Field(default=16_384, ge=8)
    """Token budget of one forward and backward pass on one rank: the only memory knob."""
    gradient_checkpointing: bool = False
    param_offload: bool = False
    """Keep parameters in host memory while the engine is idle."""
    optimizer_offload: bool = False
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of one rank; null divides the machine's cores by the ranks."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    options: dict[str, Any] = {}
    """Options of the chosen backend, validated by the backend's own schema in preflight."""


class HardwareConfig(StrictModel):
    """The accelerator that jobs run on."""

    platform: str = "auto"
    """`auto` probes in a stated order and says what it chose; a name is an order, never a hint."""
