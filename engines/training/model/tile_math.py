"""Element-wise work on a tile of logits: softmax sums and gradients.

For 16-bit logits on a GPU where torch can compile, each function is one or two kernels without a
float32 copy of the tile; otherwise it is plain in-place operators. They differ by rounding only.
Letters: R rows and C columns of the tile, K tokens of each row.
"""

import importlib.util
import shutil
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SoftmaxSums(NamedTuple):
    """The largest logit m of the columns seen so far, and sums over them; each (R,).

    Sums of exp(z - m), of exp(z - m) * (z - m) for entropies, and of exp(z - m)^2; and the
    logit of each row's token.
    """

    largest_R: Tensor
    sum_R: Tensor
    weighted_R: Tensor
    squared_R: Tensor
    chosen_R: Tensor


class LogitSlopes(NamedTuple):
    """Gradients of a loss with respect to the outputs of a tile's rows.

    Attributes:
        logprobs_RK: gradient of each token's logprob.
        place_RK: int64 index of the token among the columns; 0 if it is not there.
        inside_RK: True if the token is among the columns.
        log_sum_R: log of the sum of exp(z) over the whole vocabulary.
        entropy_R: None if its gradient is not needed.
    """

    logprobs_RK: Tensor
    place_RK: Tensor
    inside_RK: Tensor
    log_sum_R: Tensor
    entropy_R: Tensor | None = None
    grad_entropy_R: Tensor | None = None


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics and gradient sums: float32, float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scaled(logits: Tensor, scale: Tensor | None) -> Tensor:
    """Return scaled logits in the dtype of statistics; may overwrite its input."""
    logits = logits.to(statistics_dtype(logits))
    return logits if scale is None else logits.mul_(scale)


def is_fused(x: Tensor) -> bool:
    """True if the functions of this module are compiled for logits like these."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _can_compile()


def add_columns(
    sums: SoftmaxSums, logits_RC: Tensor, scale: Tensor | None, place_R1: Tensor, inside_R: Tensor,
    *, entropy: bool, squares: bool,
) -> SoftmaxSums:  # fmt: skip
    """Add the logits of some columns (online softmax, arXiv:1805.02867); overwrites them.

    Args:
        sums: of the columns before; with no columns, m is -inf and the rest 0.
        scale: 1 / temperature, a 0-d tensor; None: 1.
        place_R1: int64 index of each row's token among the columns; 0 if it is not there.
        inside_R: True if the token is among the columns.
    """
    function = _add_columns
    if is_fused(logits_RC):
        function = _fused(function, (entropy, squares, scale is None, *_singles(logits_RC)))
    return SoftmaxSums(
        *function(*sums, logits_RC, scale, place_R1, inside_R, entropy=entropy, squares=squares)
    )


def gradient_of_logits(logits_RC: Tensor, scale: Tensor | None, slopes: LogitSlopes) -> Tensor:
    """Return the (R, C) gradient of the logits before the temperature; overwrites the logits.

    d/dz of sum_k g_k log p_k is sum_k g_k (1[k] - p); of the entropy H it is -p (log p + H).
    """
    function = _gradient_of_logits
    if is_fused(logits_RC):
        flags = slopes.entropy_R is None, scale is None, *_singles(logits_RC)
        function = _fused(function, (*flags, *_singles(slopes.place_RK)))
    return function(logits_RC, scale, *slopes)


def _add_columns(
    before_R: Tensor, sum_R: Tensor, weighted_R: Tensor, squared_R: Tensor, chosen_R: Tensor,
    logits_RC: Tensor, scale: Tensor | None, place_R1: Tensor, inside_R: Tensor,
    *, entropy: bool, squares: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    z_RC = scaled(logits_RC, scale)
    chosen_R = torch.where(inside_R, z_RC.gather(1, place_R1).squeeze(1), chosen_R)
    largest_R = torch.maximum(before_R, z_RC.amax(dim=1))
    # exp(-inf) = 0 drops the empty sums of the first tile.
    fallen_R = before_R - largest_R
    kept_R = fallen_R.exp()
    z_RC = z_RC.sub_(largest_R[:, None])
    if entropy:
        exponentials = z_RC.exp()
        shift_R = torch.where(kept_R > 0, fallen_R * sum_R, 0.0)
        weighted_R = (weighted_R + shift_R) * kept_R + exponentials.mul(z_RC).sum(dim=1)
    else:
        exponentials = z_RC.exp_()
    sum_R = sum_R * kept_R + exponentials.sum(dim=1)
    if squares:
        squared_R = squared_R * kept_R.square() + exponentials.square_().sum(dim=1)
    return largest_R, sum_R, weighted_R, squared_R, chosen_R


def _gradient_of_logits(
    logits_RC: Tensor, scale: Tensor | None, grad_RK: Tensor, place_RK: Tensor, inside_RK: Tensor,
    log_sum_R: Tensor, entropy_R: Tensor | None, grad_entropy_R: Tensor | None,
) -> Tensor:  # fmt: skip
    total_R1 = grad_RK.sum(dim=1, keepdim=True)
    log_probs = scaled(logits_RC, scale).sub_(log_sum_R[:, None])
    if entropy_R is None or grad_entropy_R is None:
        grad_RC, slope_RC = log_probs.exp_().mul_(-total_R1), None
    else:
        probs = log_probs.exp()
        grad_RC = probs * -total_R1
        slope_RC = log_probs.add_(entropy_R[:, None]).mul_(probs).mul_(grad_entropy_R[:, None])
    own_RK = grad_RK * inside_RK
    if torch.compiler.is_compiling() and grad_RK.shape[1] == 1:
        # A scatter would write the gradient to memory first; a comparison fuses into the kernel.
        columns_C = torch.arange(logits_RC.shape[1], device=logits_RC.device)
        grad_RC = grad_RC + torch.where(columns_C == place_RK, own_RK, 0.0)
    else:
        grad_RC.scatter_add_(1, place_RK, own_RK)
    if slope_RC is not None:
        grad_RC = grad_RC.sub_(slope_RC)
    if scale is not None:
        grad_RC = grad_RC.mul_(scale)
    return grad_RC.to(logits_RC.dtype)


def _singles(x: Tensor) -> tuple[bool, ...]:
    """Return which sizes are 1: torch.compile specializes on such dimensions."""
    return tuple(size == 1 for size in x.shape)


@cache
def _fused(function: Callable[..., Any], form: tuple[bool, ...]) -> Callable[..., Any]:
    """Return a variant of the function, compiled once for tiles of all sizes.

    Each has its own code object: torch stops compiling one with too many variants.
    """
    name = f"{function.__name__}_{''.join(str(int(flag)) for flag in form)}"
    own = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    return torch.compile(own, dynamic=True)


@cache
def _can_compile() -> bool:
    """True if Triton and a C compiler are installed."""
    return importlib.util.find_spec("triton") is not None and any(
        shutil.which(compiler) for compiler in ("cc", "gcc", "clang")
    )
