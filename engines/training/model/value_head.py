"""Computes the head of a value model in float32, in any model dtype.

Advantages are differences of values: around 9, bfloat16 values are 0.06 apart, so the difference of
two close values would be rounding noise.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def float32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``hidden @ weight.T + bias`` in float32, with gradients in the dtypes of the inputs."""
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def compute_in_float32(head: nn.Linear) -> None:
    """Make a head compute in float32; its parameters keep dtype and device."""
    head.forward = partial(_forward, head)


def _forward(head: nn.Linear, input: Tensor) -> Tensor:
    return float32_linear(input, head.weight, head.bias)
