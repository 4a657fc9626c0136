"""Between the rows that a head computes and `ModelOutputs`: the same for every backend.

A row of numbers has one place for each position of the packed batch and one more: place p is what
the hidden state of token p - 1 says. That is the prediction of token p, or, where p is the first
position behind a sequence, what stands behind the sequence's last token: no prediction has that
place, for the first token of a sequence is never predicted.
"""

import torch
from torch import Tensor

from engines.training.model.ulysses import SequenceSlice
from engines.training.spec import ModelType
from engines.types import ModelOutputs, Readouts, TokenBatch


def read_positions(
    batch: TokenBatch, readouts: Readouts, part: SequenceSlice | None = None
) -> Tensor:
    """Places that are computed.

    Args:
        batch: predictions are wanted where its `loss_mask` is not 0; of all but the first token of
            each sequence without such a column.
        readouts: with `last_values` also the places behind the sequences.
        part: only those that a hidden state of this slice computes; None is the whole row.

    Returns:
        (N,) int64 in [1, T], ascending.
    """
    wanted_T = torch.ones_like(batch.input_ids_T, dtype=torch.bool)
    mask_T = batch.columns.get("loss_mask")
    if mask_T is not None:
        wanted_T &= mask_T != 0
    bounds = batch.cu_seqlens.to(torch.int64)
    wanted_T[bounds[:-1]] = False
    wanted = torch.cat([wanted_T, wanted_T.new_zeros(1)])
    if readouts.last_values:
        wanted[bounds[1:]] = True
    read_N = wanted.nonzero().squeeze(1)
    if part is None:
        return read_N
    end = part.start + part.input_ids_S.numel()
    return read_N[(read_N > part.start) & (read_N <= end)]


def model_outputs(
    rows: Tensor, batch: TokenBatch, readouts: Readouts, model_type: ModelType
) -> ModelOutputs:
    """Name the rows.

    Args:
        rows: (K, T + 1) float32: values; or log-probabilities and then what was asked for beside
            them, in the order of `Readouts`. 0 where nothing was computed.
        batch: the micro-batch.
        readouts: what was asked for.
        model_type: of the model.

    Returns:
        With gradient, where the rows have one.
    """
    if model_type == "value_model":
        return _values(rows[0], batch, readouts)
    of_tokens = iter(rows[:, :-1])
    return ModelOutputs(
        next(of_tokens),
        entropy_T=next(of_tokens) if readouts.entropy else None,
        sum_pi_squared_T=next(of_tokens) if readouts.sum_pi_squared else None,
    )


def _values(row: Tensor, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
    values_T, last_values_B = row[:-1], None
    if readouts.last_values:
        bounds = batch.cu_seqlens.to(torch.int64)
        last_values_B = row[bounds[1:]]
        values_T = values_T.index_fill(0, bounds[:-1], 0.0)
    return ModelOutputs(torch.zeros_like(values_T), values_T=values_T, last_values_B=last_values_B)


def num_columns(readouts: Readouts, model_type: ModelType) -> int:
    """How many numbers each token has outside of the model: see `to_columns`."""
    if model_type == "value_model":
        return 1 + readouts.last_values
    return 1 + readouts.entropy + readouts.sum_pi_squared


def to_columns(outputs: ModelOutputs, batch: TokenBatch) -> Tensor:
    """(K, T) float32 on the CPU: what there is; what is behind a sequence stands on its last token.

    Args:
        outputs: of the batch.
        batch: says where sequences end.

    Returns:
        Without gradient.
    """
    behind_T = None
    if outputs.last_values_B is not None:
        behind_T = torch.zeros_like(outputs.logprobs_T)
        behind_T[_last_tokens(batch)] = outputs.last_values_B
    first_T = outputs.logprobs_T if outputs.values_T is None else outputs.values_T
    rows = (first_T, outputs.entropy_T, outputs.sum_pi_squared_T, behind_T)
    return torch.stack([row.float().cpu() for row in rows if row is not None])


def from_columns(
    columns: Tensor, batch: TokenBatch, readouts: Readouts, model_type: ModelType
) -> ModelOutputs:
    """Undo `to_columns`."""
    first_T = columns[0]
    if model_type == "value_model":
        last_B = columns[1, _last_tokens(batch)] if readouts.last_values else None
        return ModelOutputs(torch.zeros_like(first_T), values_T=first_T, last_values_B=last_B)
    return ModelOutputs(
        first_T,
        entropy_T=columns[1] if readouts.entropy else None,
        sum_pi_squared_T=columns[-1] if readouts.sum_pi_squared else None,
    )


def _last_tokens(batch: TokenBatch) -> Tensor:
    return batch.cu_seqlens[1:].to(torch.int64) - 1
