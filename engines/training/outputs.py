"""Convert between the rows of values that a head computes and `ModelOutputs`.

A row has T + 1 places. Place p holds what the hidden state of token p - 1 gives: the prediction of
token p or, if p is the first place after a sequence, the value after its last token.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from engines.collectives import SumOverRanks
from engines.errors import EngineError
from engines.training.model.attention import SequenceSlice
from engines.training.spec import ModelType
from engines.types import ModelOutputs, Readouts, TokenBatch


def read_positions(
    batch: TokenBatch, readouts: Readouts, part: SequenceSlice | None = None
) -> Tensor:
    """Return the places to compute, (N,) int64 in [1, T]: `loss_mask` not 0, or last values.

    `part` restricts them to those that this slice's hidden states compute.
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
    return read_N[(read_N > part.start) & (read_N <= part.start + part.input_ids_S.numel())]


def whole_outputs(
    rows: Tensor,
    read_N: Tensor,
    batch: TokenBatch,
    readouts: Readouts,
    model_type: ModelType,
    group: dist.ProcessGroup | None = None,
) -> ModelOutputs:
    """Convert (K, N) float32 at the places `read_N` to outputs, with their gradient.

    `group` are ranks that computed other places of the same batch.
    """
    whole = rows.new_zeros(rows.shape[0], batch.num_tokens + 1).index_copy(1, read_N, rows)
    if group is not None:
        whole = cast(Tensor, SumOverRanks.apply(whole, group))
    return model_outputs(whole, batch, readouts, model_type)


def model_outputs(
    rows: Tensor, batch: TokenBatch, readouts: Readouts, model_type: ModelType
) -> ModelOutputs:
    """Convert (K, T + 1) float32 values or `head_rows` to outputs, with their gradient.

    Raises:
        EngineError: the backend did not compute all readouts.
    """
    if model_type == "value_model":
        values_T, last_values_B = rows[0, :-1], None
        if readouts.last_values:
            bounds = batch.cu_seqlens.to(torch.int64)
            last_values_B = rows[0, bounds[1:]]
            values_T = values_T.index_fill(0, bounds[:-1], 0.0)
        return ModelOutputs(
            torch.zeros_like(values_T), values_T=values_T, last_values_B=last_values_B
        )
    num_needed = num_columns(readouts, model_type, batch)
    if rows.shape[0] != num_needed:
        raise EngineError(
            f"readouts: the backend's head gave {rows.shape[0]} values per token; "
            f"{readouts} needs {num_needed}; the backend has to call `head_rows`"
        )
    return _of_tokens(rows[:, :-1], batch, readouts)


def _of_tokens(rows: Tensor, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
    singles = iter(rows)
    size = num_others(readouts, batch)
    start = rows.shape[0] - size * (2 if readouts.num_top else 1)
    return ModelOutputs(
        next(singles),
        entropy_T=next(singles) if readouts.entropy else None,
        sum_pi_squared_T=next(singles) if readouts.sum_pi_squared else None,
        topk_logprobs_TK=rows[start : start + size].T.contiguous() if size else None,
        topk_ids_TK=rows[start + size :].T.long().contiguous() if readouts.num_top else None,
    )


def num_columns(readouts: Readouts, model_type: ModelType, batch: TokenBatch) -> int:
    """Return K, the number of values per token in the result of `to_columns`."""
    if model_type == "value_model":
        return 1 + readouts.last_values
    others = num_others(readouts, batch) * (2 if readouts.num_top else 1)
    return 1 + readouts.entropy + readouts.sum_pi_squared + others


def num_others(readouts: Readouts, batch: TokenBatch) -> int:
    """Return K, the number of other tokens requested per position; 0 for none.

    Raises:
        EngineError: the batch has no column of token ids `logprobs_of`.
    """
    if readouts.logprobs_of is None:
        return readouts.num_top
    ids_TK = batch.columns.get(readouts.logprobs_of)
    if ids_TK is None or ids_TK.ndim != 2 or ids_TK.dtype != torch.int64:
        found = "none" if ids_TK is None else f"{tuple(ids_TK.shape)} {ids_TK.dtype}"
        raise EngineError(
            f"readouts.logprobs_of: got {found} as column {readouts.logprobs_of!r}; need token "
            "ids, (T, K) int64"
        )
    return ids_TK.shape[1]


def to_columns(outputs: ModelOutputs, batch: TokenBatch) -> Tensor:
    """Pack outputs into (K, T) float32 on the CPU, a value after a sequence at its last token."""
    behind_T = None
    if outputs.last_values_B is not None:
        behind_T = torch.zeros_like(outputs.logprobs_T)
        behind_T[_last_tokens(batch)] = outputs.last_values_B
    first_T = outputs.logprobs_T if outputs.values_T is None else outputs.values_T
    rows = (first_T, outputs.entropy_T, outputs.sum_pi_squared_T, behind_T)
    columns = [row[None] for row in rows if row is not None]
    several = (outputs.topk_logprobs_TK, outputs.topk_ids_TK)
    columns += [rows_TK.T for rows_TK in several if rows_TK is not None]
    return torch.cat([column.float().cpu() for column in columns])


def from_columns(
    columns: Tensor, batch: TokenBatch, readouts: Readouts, model_type: ModelType
) -> ModelOutputs:
    """Undo `to_columns`."""
    if model_type == "value_model":
        first_T = columns[0]
        last_B = columns[1, _last_tokens(batch)] if readouts.last_values else None
        return ModelOutputs(torch.zeros_like(first_T), values_T=first_T, last_values_B=last_B)
    return _of_tokens(columns, batch, readouts)


def _last_tokens(batch: TokenBatch) -> Tensor:
    return batch.cu_seqlens[1:].to(torch.int64) - 1
