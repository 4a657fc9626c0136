"""The mesh that FSDP shards over."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engines.training import collectives


def sharding_mesh(device_name: str, replicate_size: int) -> DeviceMesh:
    """All ranks in one dimension, or (copies, shards) for hybrid sharding.

    Args:
        device_name: torch device type.
        replicate_size: copies of the sharded model; divides the world size.

    Returns:
        The mesh.
    """
    size = collectives.world_size()
    if replicate_size == 1:
        return init_device_mesh(device_name, (size,))
    return init_device_mesh(
        device_name,
        (replicate_size, size // replicate_size),
        mesh_dim_names=("replicate", "shard"),
    )
