"""Sums of one optimizer step: denominators before it, losses and metrics after it."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.types import LossOutput, TokenBatch


def loss_counts(batch: TokenBatch) -> tuple[int, int, int]:
    """Return the numbers of trained tokens, and of sequences and units that have one."""
    mask_T = batch.columns.get("loss_mask")
    if mask_T is None:
        return 0, 0, 0
    on_T = mask_T != 0
    cumulative = torch.cat([torch.zeros(1, dtype=torch.int64), on_T.cumsum(0).cpu()])
    per_sequence_B = cumulative[batch.cu_seqlens.to(torch.int64).cpu()].diff()
    trained_B = per_sequence_B > 0
    num_sequences = int(trained_B.sum())
    if batch.unit_B is None:
        return int(cumulative[-1]), num_sequences, num_sequences
    num_units = batch.unit_B.cpu()[trained_B].unique().numel()
    return int(cumulative[-1]), num_sequences, num_units


def trained_first_token(batch: TokenBatch) -> int:
    """Return the first sequence whose first token, which has no prediction, is trained, or -1."""
    mask_T = batch.columns.get("loss_mask")
    if mask_T is None:
        return -1
    starts_B = batch.cu_seqlens[:-1].to(torch.int64).clamp(max=max(batch.num_tokens - 1, 0))
    wrong_N = ((mask_T[starts_B] != 0) & (batch.lengths_B > 0)).nonzero()
    return int(wrong_N[0]) if len(wrong_N) else -1


class Totals:
    """Sums and maxima over micro-batches, kept on the device until one exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, output: LossOutput) -> None:
        """Add one micro-batch."""
        self._loss += output.loss.detach()
        for name, value in output.metrics.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in output.maxima.items():
            value = value.detach().double()
            seen = self._maxima.get(name)
            self._maxima[name] = value if seen is None else torch.maximum(seen, value)

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[float, dict[str, float], list[int]]:
        """Return the loss, the metrics, and the group ranks whose own loss is not finite."""
        sum_names, max_names = sorted(self._sums), sorted(self._maxima)
        values = [
            self._loss,
            *(self._sums[name] for name in sum_names),
            *(self._maxima[name] for name in max_names),
        ]
        rows = collectives.gather_rows(torch.stack(values), self._device, group)
        split = 1 + len(sum_names)
        loss, *sums = collectives.column_sums([row[:split] for row in rows])
        maxima = collectives.column_maxima([row[split:] for row in rows])
        spoiled = [place for place, row in enumerate(rows) if not math.isfinite(row[0])]
        return loss, dict(zip([*sum_names, *max_names], [*sums, *maxima], strict=True)), spoiled
