"""The device mesh that FSDP shards over."""

from torch.distributed.device_mesh import DeviceMesh

from engines import collectives


def sharding_mesh(device_name: str, replicate_size: int, timeout_s: float) -> DeviceMesh:
    """Return all ranks in one dimension, or (copies, shards) for hybrid sharding."""
    size = collectives.world_size()
    if replicate_size == 1:
        return collectives.make_mesh(device_name, (size,), ("shard",), timeout_s)
    sizes = (replicate_size, size // replicate_size)
    return collectives.make_mesh(device_name, sizes, ("replicate", "shard"), timeout_s)
