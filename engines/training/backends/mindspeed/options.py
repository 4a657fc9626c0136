"""`training.options` of the backend megatron on `npu`. No torch: the plan reads them."""

from engines.training.backends.megatron_options import MegatronOptions


class MindSpeedOptions(MegatronOptions):
    """`training.options` of the backend megatron on `npu`."""

    fused_rms_norm: bool = True
    """Ascend's fused RMSNorm."""
    fused_swiglu: bool = True
    """Ascend's fused SwiGLU."""
    fused_rotary: bool = True
    """Ascend's fused rotary embedding."""
    overlap_tensor_parallel: bool = False
    """Ascend's products that run together with the collectives of tensor parallelism."""
