"""`training.options` of the backend automodel, without torch."""

from engines.config.base import StrictModel


class AutomodelOptions(StrictModel):
    """`training.options` of the backend automodel, named as in its `FSDP2Config`."""

    reshard_after_forward: bool | None = None
    """Free gathered weights after forward; null is Automodel's choice: all layers but the last."""
    enable_fsdp2_prefetch: bool = True
    """Prefetch the all-gather of layers explicitly."""
