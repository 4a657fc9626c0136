"""`training.options` of the backend torchtitan, without torch."""

from typing import Literal

from engines.config.base import StrictModel


class TorchTitanOptions(StrictModel):
    """`training.options` of the backend torchtitan, named as in TorchTitan."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When to free a layer's gathered weights after its forward pass."""
