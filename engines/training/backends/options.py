"""`training.options` of the built-in backends, without torch."""

from typing import Literal

from engines.config.base import StrictModel


class FSDP2Options(StrictModel):
    """`training.options` of the backend fsdp2."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; false trades memory for speed."""
    num_prefetched_layers: int = 0
    """Layers to all-gather ahead of their forward pass; 0: the implicit prefetch of one layer."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer in host memory; copy layers to the device for use."""


class FSDPOptions(StrictModel):
    """`training.options` of the backend fsdp."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; false trades memory for speed."""
    forward_prefetch: bool = False
    """All-gather the next layer before the current one has run."""


class MegatronOptions(StrictModel):
    """`training.options` of the backend megatron."""

    transformer_engine: bool = False
    """Use layers of TransformerEngine (which must be installed), not Megatron-Core's own."""
    router_replay: bool = False
    """Train a mixture on the experts that `infer_batch` chose for the same sequences."""


class MindSpeedOptions(MegatronOptions):
    """`training.options` of the backend megatron on `npu`."""

    fused_rms_norm: bool = True
    """Use Ascend's fused RMSNorm."""
    fused_swiglu: bool = True
    """Use Ascend's fused SwiGLU."""
    fused_rotary: bool = True
    """Use Ascend's fused rotary embedding."""
    overlap_tensor_parallel: bool = False
    """Overlap matrix products with the collectives of tensor parallelism (MC2)."""


class TorchTitanOptions(StrictModel):
    """`training.options` of the backend torchtitan, named as in TorchTitan."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When to free a layer's gathered weights after its forward pass."""


class VeOmniOptions(StrictModel):
    """`training.options` of the backend veomni; kernels are named as in VeOmni."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; false trades memory for speed."""
    rms_norm: Literal["eager", "liger_kernel", "npu"] = "eager"
    swiglu_mlp: Literal["eager", "liger_kernel"] = "eager"
    rotary_pos_emb: Literal["eager", "liger_kernel", "npu"] = "eager"


class AutomodelOptions(StrictModel):
    """`training.options` of the backend automodel, named as in its `FSDP2Config`."""

    reshard_after_forward: bool | None = None
    """Free gathered weights after forward; null is Automodel's choice: all layers but the last."""
    enable_fsdp2_prefetch: bool = True
    """Prefetch the all-gather of layers explicitly."""
