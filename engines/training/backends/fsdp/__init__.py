"""FSDP2: parameters, gradients and optimizer sharded over the data-parallel ranks."""
