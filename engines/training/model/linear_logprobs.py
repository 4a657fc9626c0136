"""Log-probabilities of given tokens straight from hidden states: the logits never exist at once.

Promises: at any moment a few tiles of logits of `chunk_elements` exist, whatever the number of
tokens and the vocabulary; between forward and backward only inputs and two numbers per row are
kept; the backward pass computes the tiles anew (one extra product with the head's weights).
Float32 softmax statistics, and float32 sums of gradients over tiles (float64 for float64 inputs);
the same numbers with and without gradient. Logits are rounded to the dtype of the inputs, as the
model's own head does.
The vocabulary may be cut over the ranks of a group, by rows of the weights.
Does not cover: soft-capped logits, second derivatives.
Letters: N predicting positions, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines import collectives
from engines.training.model.logprobs import TokenReadouts

DEFAULT_CHUNK_ELEMENTS = 1 << 24
"""Elements of a tile: 64 MiB in float32."""
_UNLIMITED = 1 << 62

_MIN_ROWS = 512
"""A tile of fewer rows would read the weights faster than it computes; it takes fewer columns."""


def tile_elements(*, chunked: bool) -> int:
    """Elements of a tile under `training.chunked_logprobs`: without, one tile holds all logits."""
    return DEFAULT_CHUNK_ELEMENTS if chunked else _UNLIMITED


def linear_token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    token_ids_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
) -> TokenReadouts:
    """Log-probability of one token per row under softmax((hidden @ weight.T + bias) / temperature).

    Gradients flow from log-probabilities and entropies to hidden states, weights and bias. With a
    group, the results are the same on every rank, and so must be their gradients; the gradient of
    the hidden states is this rank's part of a sum over the group.

    Args:
        hidden_ND: (N, D) float32, bfloat16, float16 or float64.
        weight_VD: (V, D) of the same dtype.
        token_ids_N: (N,) int64, each in [0, V).
        bias_V: (V,) of the same dtype, finite.
        temperature: of the distribution, above 0.
        entropy: also compute the entropy of each row's distribution, in nats.
        sum_pi_squared: also compute the sum of its squared probabilities, without gradient.
        chunk_elements: most logits of a tile; results do not depend on it beyond rounding.
        group: ranks that hold the rows of the weights, each its own; hidden states and tokens
            are the same on all of them. None: this rank holds all rows.
        first_token: the token that this rank's first row stands for.

    Returns:
        Each (N,) float32, float64 where the inputs are.

    Raises:
        ValueError: dtypes differ, or `chunk_elements` is below 1.
    """
    dtypes = {x.dtype for x in (hidden_ND, weight_VD, bias_V) if x is not None}
    if len(dtypes) > 1:
        raise ValueError(f"hidden states, weights and bias: got {sorted(map(str, dtypes))}")
    if chunk_elements < 1:
        raise ValueError(f"chunk_elements: got {chunk_elements}; need at least 1")
    logprobs_N, entropy_N, squares_N = cast(
        tuple[Tensor, Tensor, Tensor],
        _LinearTokenLogprobs.apply(
            hidden_ND, weight_VD, bias_V, token_ids_N - first_token, 1.0 / temperature, entropy,
            sum_pi_squared, chunk_elements, group,
        ),
    )  # fmt: skip
    return TokenReadouts(
        logprobs_N, entropy_N if entropy else None, squares_N if sum_pi_squared else None
    )


class _LinearTokenLogprobs(torch.autograd.Function):
    """Online softmax over tiles (arXiv:1805.02867); the backward pass redoes each tile."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, token_ids_N: Tensor,
        scale: float, entropy: bool, squares: bool, chunk_elements: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        num_rows, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
        rows_size, columns_size = _tile_shape(num_rows, vocabulary, chunk_elements)
        dtype = _statistics_dtype(hidden_ND)
        parts: list[_RowStatistics] = []
        for rows in _slices(num_rows, rows_size):
            part = _RowStatistics(token_ids_N[rows], dtype, entropy, squares)
            for columns in _slices(vocabulary, columns_size):
                part.add(_tile(hidden_ND, weight_VD, bias_V, rows, columns, scale), columns)
            parts.append(part)
        statistics = _RowStatistics(token_ids_N, dtype, entropy, squares)
        statistics.take(parts)
        if group is not None:
            statistics.sum_over(group)
        log_sum_N, logprobs_N = statistics.log_sum(), statistics.logprobs()
        entropy_N = statistics.entropy() if entropy else logprobs_N.new_empty(0)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, token_ids_N, log_sum_N, entropy_N)
        ctx.scale, ctx.tile_shape = scale, (rows_size, columns_size)
        squares_N = statistics.sum_pi_squared() if squares else logprobs_N.new_empty(0)
        ctx.mark_non_differentiable(squares_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, token_ids_N, log_sum_N, entropy_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N, _ = grad_outputs
        if grad_logprobs_N is None:  # a loss of the entropy alone
            grad_logprobs_N = torch.zeros_like(log_sum_N)
        rows_size, columns_size = ctx.tile_shape
        sums = _GradientSums(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad)
        # The vocabulary outside: then the float32 sum of the weights' gradient is one tile wide.
        for columns in _slices(weight_VD.shape[0], columns_size):
            sums.begin(columns)
            for rows in _slices(hidden_ND.shape[0], rows_size):
                log_probs = _tile(hidden_ND, weight_VD, bias_V, rows, columns, ctx.scale)
                log_probs.sub_(log_sum_N[rows, None])
                probs = log_probs.exp()
                grad = probs * -grad_logprobs_N[rows, None]
                place, inside = _places(token_ids_N[rows], columns)
                grad.scatter_add_(1, place, (grad_logprobs_N[rows] * inside)[:, None])
                if grad_entropy_N is not None and entropy_N.numel():
                    # dH/dz = -p * (log p + H)
                    slope = log_probs.add_(entropy_N[rows, None]).mul_(probs)
                    grad.sub_(slope.mul_(grad_entropy_N[rows, None]))
                sums.add(grad.mul_(ctx.scale).to(hidden_ND.dtype), rows)
            sums.end()
        return *sums.gradients(), None, None, None, None, None, None


class _RowStatistics:
    """What the softmax of some rows needs, gathered tile by tile over the vocabulary.

    Holds the largest logit m, sum of exp(z - m), sum of exp(z - m) * (z - m), sum of
    exp(z - m)^2 and the logit of each row's token.
    """

    def __init__(
        self, token_ids_R: Tensor, dtype: torch.dtype, entropy: bool, squares: bool
    ) -> None:
        self._token_ids_R = token_ids_R
        self._entropy, self._squares = entropy, squares
        zeros_R = torch.zeros(token_ids_R.shape[0], dtype=dtype, device=token_ids_R.device)
        self._largest_R = torch.full_like(zeros_R, -torch.inf)
        self._sum_R, self._weighted_R, self._chosen_R = zeros_R, zeros_R, zeros_R
        self._squared_R = zeros_R

    def add(self, z_RC: Tensor, columns: slice) -> None:
        """Take in the logits of some columns; overwrites them."""
        place, inside = _places(self._token_ids_R, columns)
        self._chosen_R = torch.where(inside, z_RC.gather(1, place).squeeze(1), self._chosen_R)
        largest_R = torch.maximum(self._largest_R, z_RC.amax(dim=1))
        # exp(-inf) = 0 drops the empty sums of the first tile.
        fallen_R = self._largest_R - largest_R
        kept_R = fallen_R.exp()
        z_RC.sub_(largest_R[:, None])
        if self._entropy:
            exponentials = z_RC.exp()
            shift_R = torch.where(kept_R > 0, fallen_R * self._sum_R, 0.0)
            weighted_R = exponentials.mul(z_RC).sum(dim=1)
            self._weighted_R = (self._weighted_R + shift_R) * kept_R + weighted_R
        else:
            exponentials = z_RC.exp_()
        self._sum_R = self._sum_R * kept_R + exponentials.sum(dim=1)
        if self._squares:
            squared_R = exponentials.square_().sum(dim=1)
            self._squared_R = self._squared_R * kept_R.square() + squared_R
        self._largest_R = largest_R

    def take(self, parts: Sequence["_RowStatistics"]) -> None:
        """Lay the statistics of consecutive rows end to end; they are all of this object's."""
        if parts:
            self._largest_R = torch.cat([part._largest_R for part in parts])
            self._sum_R = torch.cat([part._sum_R for part in parts])
            self._weighted_R = torch.cat([part._weighted_R for part in parts])
            self._chosen_R = torch.cat([part._chosen_R for part in parts])
            self._squared_R = torch.cat([part._squared_R for part in parts])

    def sum_over(self, group: dist.ProcessGroup) -> None:
        """Take in the statistics of the other ranks' columns; the same on every rank then."""
        largest_R = self._largest_R.clone()
        collectives.all_reduce(largest_R, group, dist.ReduceOp.MAX)
        fallen_R = self._largest_R - largest_R
        kept_R = fallen_R.exp()
        shift_R = torch.where(kept_R > 0, fallen_R * self._sum_R, 0.0)
        own = [self._sum_R * kept_R, (self._weighted_R + shift_R) * kept_R, self._chosen_R]
        if self._squares:
            own.append(self._squared_R * kept_R.square())
        sums = torch.stack(own)
        collectives.all_reduce(sums, group)
        self._largest_R = largest_R
        self._sum_R, self._weighted_R, self._chosen_R = sums[:3].unbind()
        self._squared_R = sums[-1] if self._squares else self._squared_R

    def log_sum(self) -> Tensor:
        """(R,) log of the sum of exp(z)."""
        return self._largest_R + self._sum_R.log()

    def logprobs(self) -> Tensor:
        """(R,) log-probability of each row's token."""
        return self._chosen_R - self.log_sum()

    def sum_pi_squared(self) -> Tensor:
        """(R,) sum of the squared probabilities."""
        return self._squared_R / self._sum_R.square()

    def entropy(self) -> Tensor:
        """(R,) entropy: log of the sum minus the mean logit, both relative to the largest."""
        return self._sum_R.log() - self._weighted_R / self._sum_R


class _GradientSums:
    """Gradients of hidden states, weights and bias, of those that are asked for."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self._hidden_ND, self._weight_VD = hidden_ND, weight_VD
        self._sum_dtype = _statistics_dtype(hidden_ND)
        self._hidden_sum = self._zeros(hidden_ND.shape) if needed[0] else None
        self._weight_grad = torch.empty_like(weight_VD) if needed[1] else None
        self._bias_grad = torch.empty_like(bias_V) if needed[2] and bias_V is not None else None

    def begin(self, columns: slice) -> None:
        """Start with some columns of the vocabulary."""
        self._columns = columns
        width = columns.stop - columns.start
        if self._weight_grad is not None:
            self._weight_sum = self._zeros((width, self._hidden_ND.shape[1]))
        if self._bias_grad is not None:
            self._bias_sum = self._zeros((width,))

    def add(self, grad_RC: Tensor, rows: slice) -> None:
        """Take in the gradient of a tile of logits."""
        if self._hidden_sum is not None:
            self._accumulate(self._hidden_sum[rows], grad_RC, self._weight_VD[self._columns])
        if self._weight_grad is not None:
            self._accumulate(self._weight_sum, grad_RC.T, self._hidden_ND[rows])
        if self._bias_grad is not None:
            self._bias_sum += grad_RC.sum(dim=0, dtype=self._sum_dtype)

    def end(self) -> None:
        """Round the sums of these columns."""
        if self._weight_grad is not None:
            self._weight_grad[self._columns] = self._weight_sum.to(self._weight_grad.dtype)
        if self._bias_grad is not None:
            self._bias_grad[self._columns] = self._bias_sum.to(self._bias_grad.dtype)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weights and bias; None of what was not asked for."""
        hidden = self._hidden_sum
        hidden = None if hidden is None else hidden.to(self._hidden_ND.dtype)
        return hidden, self._weight_grad, self._bias_grad

    def _accumulate(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            total += left @ right

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self._hidden_ND.new_zeros(shape, dtype=self._sum_dtype)


def _tile(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: slice, columns: slice,
    scale: float,
) -> Tensor:  # fmt: skip
    """Scaled logits of some rows and columns, in a tensor of their own."""
    bias = None if bias_V is None else bias_V[columns]
    logits = torch.nn.functional.linear(hidden_ND[rows], weight_VD[columns], bias)
    logits = logits.to(_statistics_dtype(hidden_ND))
    return logits if scale == 1.0 else logits.mul_(scale)


def _places(token_ids_R: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Place of each token among the columns (0 where it is not), and whether it is."""
    inside_R = (token_ids_R >= columns.start) & (token_ids_R < columns.stop)
    return torch.where(inside_R, token_ids_R - columns.start, 0)[:, None], inside_R


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _tile_shape(num_rows: int, vocabulary: int, chunk_elements: int) -> tuple[int, int]:
    """Whole rows while enough of them fit, else `_MIN_ROWS` of them and part of the vocabulary."""
    rows = min(max(1, num_rows), max(_MIN_ROWS, chunk_elements // vocabulary))
    rows = min(rows, chunk_elements)
    return rows, max(1, min(vocabulary, chunk_elements // rows))


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
