"""AdamW whose state exists before the first step."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engines.checkpoint.engine_state import AVERAGE
from engines.config.training import OptimizerConfig


def decayed_names(model: nn.Module) -> set[str]:
    """Return the parameters with weight decay: not one-dimensional ones (norms, biases)."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() > 1}


def make_adamw(
    named: Iterable[tuple[str, nn.Parameter]], decayed: Collection[str], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Create AdamW (arXiv:1711.05101) over the trained parameters.

    Its state exists from the start, so that every checkpoint holds the same tensors.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    groups: dict[tuple[bool, DeviceMesh | None], dict[str, Any]] = {}
    for name, parameter in trained:
        # The fused step takes tensors of one mesh; tensor parallelism has two.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = groups.setdefault((name in decayed, mesh), {"params": []})
        group["params"].append(parameter)
        if name not in decayed:
            group["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(
        list(groups.values()),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for _, parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        if config.ema is not None:
            optimizer.state[parameter][AVERAGE] = parameter.detach().clone()
    return optimizer
