"""`training.options` of the backend torchtitan. No torch: the plan reads them."""

from typing import Literal

from engines.config.base import StrictModel


class TorchTitanOptions(StrictModel):
    """`training.options` of the backend torchtitan, named as TorchTitan names them."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a layer's gathered weights are freed after its forward pass."""
