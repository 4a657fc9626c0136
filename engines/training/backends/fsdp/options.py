"""`training.options` of the backends fsdp2 and fsdp. No torch: the plan reads them."""

from engines.config.base import StrictModel


class FSDP2Options(StrictModel):
    """`training.options` of the backend fsdp2."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; false trades memory for speed."""
    num_prefetched_layers: int = 0
    """Layers gathered ahead of their forward pass; 0 leaves it to the implicit prefetch of one."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer in host memory always; layers come for their turn."""


class FSDPOptions(StrictModel):
    """`training.options` of the backend fsdp."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; false trades memory for speed."""
    forward_prefetch: bool = False
    """Gather the next layer before this one has run."""
