"""Tiles of a head's logits, and sums of statistics and gradients over tiles.

Promises: equal inputs and tile shapes give bit-identical logits and statistics. Statistics and sums
of gradients are float32 (float64 for float64 inputs). A rank may hold no rows of the weights.
For 16-bit logits on a GPU where torch can compile, element-wise work on a tile is one or two
kernels without a float32 copy of the tile; otherwise plain in-place operators. They differ by
rounding only.
Letters: N predicting positions, R of them in a tile, D model width, V vocabulary, C columns of it,
K tokens of each row.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from hardware.detection import has_kernel_compiler


class SoftmaxSums(NamedTuple):
    """The largest logit m of the columns seen so far, and sums over them; each (R,).

    Sums of exp(z - m), of exp(z - m) * (z - m) for entropies, and of exp(z - m)^2.
    """

    largest_R: Tensor
    sum_R: Tensor
    weighted_R: Tensor
    squared_R: Tensor


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
    """True if the functions of this module are compiled for the device and dtype of `x`."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_kernel_compiler()


def _add_columns(
    before_R: Tensor, sum_R: Tensor, weighted_R: Tensor, squared_R: Tensor,
    logits_RC: Tensor, scale: Tensor | None, *, entropy: bool, squares: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Add the logits of some columns (online softmax, arXiv:1805.02867); overwrites them.

    Args:
        before_R: largest logit m of the columns before, with the sums of the next three arguments;
            with no columns, m is -inf and the sums are 0.
        scale: 1 / temperature, a 0-d tensor; None: 1.
    """
    z_RC = scaled(logits_RC, scale)
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
    return largest_R, sum_R, weighted_R, squared_R


def _gradient_of_logits(
    logits_RC: Tensor, scale: Tensor | None, grad_RK: Tensor, place_RK: Tensor, inside_RK: Tensor,
    log_sum_R: Tensor, entropy_R: Tensor | None, grad_entropy_R: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the (R, C) gradient of the logits before the temperature; overwrites the logits.

    d/dz of sum_k g_k log p_k is sum_k g_k (1[k] - p); of the entropy H it is -p (log p + H).
    """
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


DEFAULT_CHUNK_ELEMENTS = 1 << 24
"""Elements of a tile: 64 MiB in float32."""
FUSED_CHUNK_ELEMENTS = 1 << 26
"""Elements of a tile for fused kernels, which need no float32 copy of it: 128 MiB in 16 bits."""

_MIN_ROWS = 512
"""Minimum rows of a tile, so that it is not bound by reading the weights."""
_MOST_COLUMNS = 1 << 15
"""Maximum columns of a tile unless rows are few; bounds the float32 sum of weight gradients."""


def tile_elements(hidden_ND: Tensor, *, chunked: bool) -> int:
    """Return the maximum logits of a tile; one tile holds all logits if not `chunked`."""
    if not chunked:
        return 1 << 62
    return FUSED_CHUNK_ELEMENTS if is_fused(hidden_ND) else DEFAULT_CHUNK_ELEMENTS


def check_inputs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, chunk_elements: int
) -> None:
    """Check the arguments of a tiled head.

    Raises:
        ValueError: dtypes differ, or `chunk_elements` is below 1.
    """
    dtypes = {x.dtype for x in (hidden_ND, weight_VD, bias_V) if x is not None}
    if len(dtypes) > 1:
        raise ValueError(f"hidden states, weights and bias: got {sorted(map(str, dtypes))}")
    if chunk_elements < 1:
        raise ValueError(f"chunk_elements: got {chunk_elements}; need at least 1")


class RowStatistics:
    """Softmax statistics of some rows, accumulated over tiles of the vocabulary."""

    def __init__(self, hidden_RD: Tensor, *, entropy: bool = False, squares: bool = False) -> None:
        self._entropy, self._squares = entropy, squares
        zeros_R = hidden_RD.new_zeros(hidden_RD.shape[0], dtype=statistics_dtype(hidden_RD))
        largest_R = torch.full_like(zeros_R, -torch.inf)
        # Separate tensors: code compiled for aliases of one tensor would not fit later tiles.
        self._sums = SoftmaxSums(largest_R, *(zeros_R.clone() for _ in range(3)))

    def add(self, logits_RC: Tensor, scale: Tensor | None) -> None:
        """Add a tile of logits, which is overwritten."""
        entropy, squares = self._entropy, self._squares
        function = _add_columns
        if is_fused(logits_RC):
            function = _fused(function, (entropy, squares, scale is None, *_singles(logits_RC)))
        self._sums = SoftmaxSums(
            *function(*self._sums, logits_RC, scale, entropy=entropy, squares=squares)
        )

    def take(self, parts: Sequence["RowStatistics"]) -> None:
        """Set these statistics to those of consecutive `parts`, which together are all rows."""
        if parts:
            each = zip(*(part._sums for part in parts), strict=True)
            self._sums = SoftmaxSums(*(torch.cat(tensors) for tensors in each))

    def sum_over(self, group: dist.ProcessGroup) -> None:
        """Combine with the columns of the other ranks; every rank gets the same result."""
        own = self._sums
        largest_R = own.largest_R.clone()
        collectives.all_reduce(largest_R, group, dist.ReduceOp.MAX)
        fallen_R = own.largest_R - largest_R
        kept_R = fallen_R.exp()
        shift_R = torch.where(kept_R > 0, fallen_R * own.sum_R, 0.0)
        parts = [own.sum_R * kept_R, (own.weighted_R + shift_R) * kept_R]
        if self._squares:
            parts.append(own.squared_R * kept_R.square())
        sums = torch.stack(parts)
        collectives.all_reduce(sums, group)
        squared_R = sums[-1] if self._squares else own.squared_R
        self._sums = SoftmaxSums(largest_R, sums[0], sums[1], squared_R)

    def log_sum(self) -> Tensor:
        """Return the (R,) log of the sum of exp(z)."""
        return self._sums.largest_R + self._sums.sum_R.log()

    def readouts(self) -> tuple[Tensor, Tensor]:
        """Return (R,) entropies in nats, and sums of squared probabilities; empty if not needed."""
        sums, none = self._sums, self._sums.sum_R.new_empty(0)
        entropy_R = sums.sum_R.log() - sums.weighted_R / sums.sum_R if self._entropy else none
        return entropy_R, sums.squared_R / sums.sum_R.square() if self._squares else none


def tiled_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    scale: Tensor | None,
    shape: tuple[int, int],
    needed: Sequence[bool],
    slopes_of: Callable[[slice, slice], LogitSlopes],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the `needed` gradients of hidden states, weights and bias, computed tile by tile.

    `slopes_of` gets the rows and the columns of each tile.
    """
    dtype = statistics_dtype(hidden_ND)
    hidden_sum = hidden_ND.new_zeros(hidden_ND.shape, dtype=dtype) if needed[0] else None
    weight_grad = torch.empty_like(weight_VD) if needed[1] else None
    bias_grad = torch.empty_like(bias_V) if needed[2] and bias_V is not None else None
    # Outer loop over the vocabulary: the float32 sum of weight gradients is one tile wide.
    for columns in slices(weight_VD.shape[0], shape[1]):
        own_CD, width = weight_VD[columns], columns.stop - columns.start
        weight_sum = hidden_ND.new_zeros(own_CD.shape, dtype=dtype) if needed[1] else None
        bias_sum = hidden_ND.new_zeros(width, dtype=dtype)
        for rows in slices(hidden_ND.shape[0], shape[0]):
            logits_RC = tile(hidden_ND, weight_VD, bias_V, rows, columns)
            slopes, function = slopes_of(rows, columns), _gradient_of_logits
            if is_fused(logits_RC):
                flags = slopes.entropy_R is None, scale is None, *_singles(logits_RC)
                function = _fused(function, (*flags, *_singles(slopes.place_RK)))
            grad_RC = function(logits_RC, scale, *slopes)
            if hidden_sum is not None:
                _accumulate(hidden_sum[rows], grad_RC, own_CD)
            if weight_sum is not None:
                _accumulate(weight_sum, grad_RC.T, hidden_ND[rows])
            if bias_grad is not None:
                bias_sum += grad_RC.sum(dim=0, dtype=dtype)
        # Round to the dtype of the parameters.
        if weight_grad is not None and weight_sum is not None:
            weight_grad[columns] = weight_sum.to(weight_grad.dtype)
        if bias_grad is not None:
            bias_grad[columns] = bias_sum.to(bias_grad.dtype)
    hidden_grad = None if hidden_sum is None else hidden_sum.to(hidden_ND.dtype)
    return hidden_grad, weight_grad, bias_grad


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.version.cuda is not None:
        # Adds the product before it is rounded, in one kernel.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def tile(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    """Return the logits of some rows and columns before the temperature, as a new tensor."""
    bias = None if bias_V is None else bias_V[columns]
    return torch.nn.functional.linear(hidden_ND[rows], weight_VD[columns], bias)


def scale_of(hidden_ND: Tensor, temperature: float) -> Tensor | None:
    """Return 1 / temperature as a 0-d tensor; None for 1."""
    if temperature == 1.0:
        return None
    return hidden_ND.new_full((), 1.0 / temperature, dtype=statistics_dtype(hidden_ND))


def places(token_ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return each token's index among the columns (0 if absent), and True where it is present."""
    inside = (token_ids >= columns.start) & (token_ids < columns.stop)
    return torch.where(inside, token_ids - columns.start, 0), inside


def tile_shape(
    hidden_ND: Tensor, weight_VD: Tensor, chunk_elements: int
) -> tuple[int, int]:  # fmt: skip
    """Return the rows and columns of a tile, each at least 1.

    Rows of at most `_MOST_COLUMNS` are whole if `_MIN_ROWS` of them fit. `weight_VD` may be empty.
    """
    num_rows, vocabulary = hidden_ND.shape[0], max(1, weight_VD.shape[0])
    enough = max(_MIN_ROWS, chunk_elements // vocabulary, chunk_elements // _MOST_COLUMNS)
    rows = min(max(1, num_rows), enough, chunk_elements)
    return rows, max(1, min(vocabulary, chunk_elements // rows))


def slices(total: int, size: int) -> list[slice]:
    """Return consecutive slices of a range, each of `size` except the last."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
