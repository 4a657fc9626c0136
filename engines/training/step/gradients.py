"""Gradient clipping for tensors on several device meshes.

torch's `clip_grad_norm_` takes tensors of one mesh only. The norm is the same on every rank;
parameters replicated over tensor-parallel ranks count once.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_across_meshes(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm`. Collective.

    Returns the norm before. Parameters are plain tensors or DTensors of any mesh.
    """
    kinds: dict[object, list[Tensor]] = {}
    for grad in (p.grad for p in parameters if p.grad is not None):
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault(kind, []).append(grad)
    norms = [torch.nn.utils.get_total_norm(grads) for grads in kinds.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = float(torch.stack(whole).norm())
    # The same epsilon as in torch.
    scale = min(1.0, max_norm / (total + 1e-6))
    for grads in kinds.values():
        for grad in grads:
            grad.mul_(scale)
    return total
