"""`training.options` of the backend automodel. No torch: the plan reads them."""

from engines.config.base import StrictModel


class AutomodelOptions(StrictModel):
    """`training.options` of the backend automodel, as Automodel's `FSDP2Config` names them."""

    reshard_after_forward: bool | None = None
    """Null is Automodel's choice: every layer but the last."""
    enable_fsdp2_prefetch: bool = True
    """Gather layers ahead of their turn, explicitly."""
