"""What is computed of each element of a tile of logits: softmax sums, and gradients.

Promises: one definition for every device. Where logits of 16 bits lie on a GPU for which torch can
compile, each function is one or two kernels that read the tile and never hold it in float32;
elsewhere they are plain operators, in place. Compiled or not, results differ by rounding only; the
same call gives the same numbers whoever asks.
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
    """Of the columns seen so far; each (R,) in the dtype of statistics.

    Attributes:
        largest_R: the largest logit m.
        sum_R: sum of exp(z - m).
        weighted_R: sum of exp(z - m) * (z - m), where entropies are asked for.
        squared_R: sum of exp(z - m)^2, where it is asked for.
        chosen_R: the logit of each row's token.
    """

    largest_R: Tensor
    sum_R: Tensor
    weighted_R: Tensor
    squared_R: Tensor
    chosen_R: Tensor


class LogitSlopes(NamedTuple):
    """What a loss says of a tile's rows.

    Attributes:
        logprobs_RK: (R, K) gradient of each token's log-probability.
        place_RK: (R, K) int64, the token's place among the columns; 0 where it is not there.
        inside_RK: (R, K) bool, whether it is there.
        log_sum_R: (R,) log of the sum of exp(z) over the whole vocabulary.
        entropy_R: (R,) of the row's distribution; None: its gradient is not asked for.
        grad_entropy_R: (R,) gradient of the entropy; None likewise.
    """

    logprobs_RK: Tensor
    place_RK: Tensor
    inside_RK: Tensor
    log_sum_R: Tensor
    entropy_R: Tensor | None = None
    grad_entropy_R: Tensor | None = None


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Of softmax statistics and sums of gradients: float32, float64 where the inputs are."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scaled(logits: Tensor, scale: Tensor | None) -> Tensor:
    """Logits in the dtype of statistics, over the temperature; may overwrite what it is given."""
    logits = logits.to(statistics_dtype(logits))
    return logits if scale is None else logits.mul_(scale)


def is_fused(x: Tensor) -> bool:
    """Whether the functions of this module are compiled for logits like these."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _can_compile()


def add_columns(
    sums: SoftmaxSums, logits_RC: Tensor, scale: Tensor | None, place_R1: Tensor, inside_R: Tensor,
    *, entropy: bool, squares: bool,
) -> SoftmaxSums:  # fmt: skip
    """Take in the logits of some columns (online softmax, arXiv:1805.02867).

    Args:
        sums: of the columns before; of none, m is -inf and the rest 0.
        logits_RC: (R, C); overwritten.
        scale: one over the temperature, without dimensions; None: 1.
        place_R1: (R, 1) int64, where each row's token is among the columns; 0 where it is not.
        inside_R: (R,) bool, whether it is there.
        entropy: gather what entropies need.
        squares: gather what sums of squared probabilities need.

    Returns:
        The sums with these columns in.
    """
    function = _add_columns
    if is_fused(logits_RC):
        function = _fused(function, (entropy, squares, scale is None, *_singles(logits_RC)))
    return SoftmaxSums(
        *function(*sums, logits_RC, scale, place_R1, inside_R, entropy=entropy, squares=squares)
    )


def gradient_of_logits(logits_RC: Tensor, scale: Tensor | None, slopes: LogitSlopes) -> Tensor:
    """(R, C) gradient of the logits before the temperature, in their dtype; overwrites them.

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
        # A scatter would need the gradient in memory; a comparison is part of the one pass.
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
    """Which sizes are 1: such a dimension is compiled apart from all others."""
    return tuple(size == 1 for size in x.shape)


@cache
def _fused(function: Callable[..., Any], form: tuple[bool, ...]) -> Callable[..., Any]:
    """A form of the function, compiled once for tiles of all sizes.

    Each form has code of its own: torch gives up to compile a code that has too many forms.
    """
    name = f"{function.__name__}_{''.join(str(int(flag)) for flag in form)}"
    own = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    return torch.compile(own, dynamic=True)


@cache
def _can_compile() -> bool:
    """Whether this process has what compiled GPU code takes: Triton and a C compiler."""
    return importlib.util.find_spec("triton") is not None and any(
        shutil.which(compiler) for compiler in ("cc", "gcc", "clang")
    )
