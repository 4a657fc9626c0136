"""`training.options` of the backends fsdp2 and fsdp, without torch."""

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
