"""`training.options` of the backend megatron on `npu`, without torch."""

from engines.training.backends.megatron_options import MegatronOptions


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
