"""`training.options` of the backend veomni, without torch."""

from typing import Literal

from engines.config.base import StrictModel


class VeOmniOptions(StrictModel):
    """`training.options` of the backend veomni; kernels are named as in VeOmni."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; false trades memory for speed."""
    rms_norm: Literal["eager", "liger_kernel", "npu"] = "eager"
    swiglu_mlp: Literal["eager", "liger_kernel"] = "eager"
    rotary_pos_emb: Literal["eager", "liger_kernel", "npu"] = "eager"
