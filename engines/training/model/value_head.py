"""The head of a value model computes in float32, whatever the model does.

Differences of values are what advantages are made of: of values around 9 bfloat16 tells those apart
that differ by 0.06, and a difference of two of them is rounding.
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
    """Have a head compute so. Its parameters stay what and where they are."""
    head.forward = partial(_forward, head)


def _forward(head: nn.Linear, input: Tensor) -> Tensor:
    return float32_linear(input, head.weight, head.bias)
