"""Boundary types of the data plane; those of sampling are in `engines.requests`.

Letters: B sequences, T tokens of all sequences laid end to end, K values per token or sequence,
V vocabulary, D model width.

Alignment: the value of a per-token column at position t is about *predicting* token t from the
tokens before it in its sequence. So `logprobs_T[t] = log p(id_t | ids_<t)`, and the first position
of every sequence has no prediction: its logprob and its loss mask are 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from engines.images import ImagePatches
from engines.requests import (  # noqa: F401  plugins import them from here
    Completion,
    Generate,
    RolloutRequest,
    SamplingParams,
    StructuredOutput,
)
from engines.selection import RowSelection


@dataclass(frozen=True)
class TokenBatch:
    """B sequences laid end to end, without padding.

    Attributes:
        input_ids_T: (T,) int64, or int32 before `widened`.
        cu_seqlens: (B + 1,) int32, cumulative lengths; starts at 0, ends at T.
        columns: per-token columns by name, each (T,) or (T, K), float32 unless said otherwise.
            Among them: `loss_mask` (1 where the token is trained on; bool before `widened`),
            `advantages`, `old_logprobs` (training engine, before the update), `rollout_logprobs`,
            `ref_logprobs`.
        images: images of the sequences; None if there are none. Their placeholder tokens are in
            `input_ids_T`.
        rows: per-sequence values by name, each (B,) or (B, K), of any dtype.
        unit_B: (B,) int64, the unit (a pair, a group) of each sequence. A unit is never split over
            batches. None: each sequence is a unit.
    """

    input_ids_T: Tensor
    cu_seqlens: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    images: ImagePatches | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    unit_B: Tensor | None = None

    def __post_init__(self) -> None:
        if int(self.cu_seqlens[-1]) != self.input_ids_T.numel():
            raise ValueError(
                f"cu_seqlens ends at {int(self.cu_seqlens[-1])}, "
                f"tokens are {self.input_ids_T.numel()}"
            )
        for name, column in self.columns.items():
            _check_first(f"column {name}", column, self.num_tokens)
        for name, row in self.rows.items():
            _check_first(f"row {name}", row, self.num_sequences)
        if self.unit_B is not None and self.unit_B.shape != (self.num_sequences,):
            raise ValueError(f"unit_B: {tuple(self.unit_B.shape)} != ({self.num_sequences},)")
        if self.images is not None and self.images.num_images_B.shape != (self.num_sequences,):
            raise ValueError(
                f"images are of {self.images.num_images_B.numel()} sequences, "
                f"the batch has {self.num_sequences}"
            )

    @staticmethod
    def from_sequences(
        input_ids: Sequence[Sequence[int]],
        *,
        images: ImagePatches | None = None,
        **columns: Sequence[Sequence[float]],
    ) -> "TokenBatch":
        """Lay sequences end to end; `ValueError` if a column's lists have other lengths."""
        lengths = [len(ids) for ids in input_ids]
        for name, rows in columns.items():
            if [len(row) for row in rows] != lengths:
                raise ValueError(f"column {name} does not have the lengths of input_ids")
        return TokenBatch(
            torch.tensor([t for ids in input_ids for t in ids], dtype=torch.int64),
            torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            {
                name: torch.tensor([x for row in rows for x in row], dtype=torch.float32)
                for name, rows in columns.items()
            },
            images,
        )

    @cached_property
    def num_sequences(self) -> int:
        """Number of sequences B."""
        return self.cu_seqlens.numel() - 1

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return self.input_ids_T.numel()

    @property
    def lengths_B(self) -> Tensor:
        """(B,) int32 lengths of the sequences."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def sequence_index_T(self) -> Tensor:
        """(T,) int64 sequence of each token."""
        index = torch.arange(self.num_sequences, device=self.input_ids_T.device)
        return index.repeat_interleave(self.lengths_B.to(torch.int64))

    @property
    def position_ids_T(self) -> Tensor:
        """(T,) int64 position of each token in its sequence."""
        starts_T = self.cu_seqlens[:-1].to(torch.int64)[self.sequence_index_T]
        return torch.arange(self.num_tokens, device=self.input_ids_T.device) - starts_T

    @property
    def units(self) -> list[list[int]]:
        """Sequence indices of each unit, ordered by first occurrence."""
        if self.unit_B is None:
            return [[index] for index in range(self.num_sequences)]
        found: dict[int, list[int]] = {}
        for index, unit in enumerate(self.unit_B.tolist()):
            found.setdefault(unit, []).append(index)
        return list(found.values())

    def token_index_T(self, sequences: Sequence[int]) -> Tensor:
        """Return the (T,) int64 indices of the tokens of the given sequences, in that order."""
        device = self.input_ids_T.device
        chosen = torch.tensor(list(sequences), dtype=torch.int64, device=device)
        lengths_B = self.lengths_B[chosen].to(torch.int64)
        shift_B = self.cu_seqlens[:-1][chosen].to(torch.int64) - (lengths_B.cumsum(0) - lengths_B)
        num_tokens = int(lengths_B.sum())
        return torch.arange(num_tokens, device=device) + shift_B.repeat_interleave(lengths_B)

    def select(self, sequences: Sequence[int]) -> "TokenBatch":
        """Return the given sequences in that order; raise ValueError if a unit is split."""
        chosen = torch.tensor(list(sequences), dtype=torch.int64, device=self.input_ids_T.device)
        if self.unit_B is not None:
            is_of_unit_B = torch.isin(self.unit_B, self.unit_B[chosen])
            if int(is_of_unit_B.sum()) != chosen.numel():
                is_of_unit_B[chosen] = False
                apart = sorted({*self.unit_B[is_of_unit_B].tolist()})[:5]
                raise ValueError(f"units are taken apart or repeated: {apart}")
        ends_B = self.lengths_B[chosen].to(torch.int64).cumsum(0)
        tokens = RowSelection(self.token_index_T(sequences), self.cu_seqlens, sequences)
        rows = RowSelection(chosen, torch.arange(len(self.cu_seqlens)), sequences)
        return TokenBatch(
            tokens.of(self.input_ids_T),
            torch.cat([ends_B.new_zeros(1), ends_B]).to(torch.int32),
            {name: tokens.of(column) for name, column in self.columns.items()},
            self.images.select(sequences) if self.images is not None else None,
            {name: rows.of(row) for name, row in self.rows.items()},
            rows.of(self.unit_B) if self.unit_B is not None else None,
        )

    def with_columns(self, **columns: Tensor) -> "TokenBatch":
        """Return the batch with columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def with_rows(self, **rows: Tensor) -> "TokenBatch":
        """Return the batch with rows added or replaced."""
        return replace(self, rows={**self.rows, **rows})

    def widened(self) -> "TokenBatch":
        """Return the batch as models and losses read it: ids int64, `loss_mask` float32.

        A driver holds a step of about 10^8 tokens as int32 and bool; each rank widens its share.
        """
        mask = self.columns.get("loss_mask")
        columns = {} if mask is None else {"loss_mask": mask.float()}
        return replace(self.with_columns(**columns), input_ids_T=self.input_ids_T.long())

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Return the batch on another device."""
        return TokenBatch(
            self.input_ids_T.to(device),
            self.cu_seqlens.to(device),
            {name: column.to(device) for name, column in self.columns.items()},
            self.images.to(device) if self.images is not None else None,
            {name: row.to(device) for name, row in self.rows.items()},
            self.unit_B.to(device) if self.unit_B is not None else None,
        )


def _check_first(what: str, values: Tensor, size: int) -> None:
    if values.ndim not in (1, 2) or values.shape[0] != size:
        raise ValueError(f"{what}: {tuple(values.shape)}; need ({size},) or ({size}, K)")


@dataclass(frozen=True)
class Readouts:
    """Outputs to compute besides logprobs or values. Logits are never returned.

    Attributes:
        entropy: entropy of each predicting distribution, in nats.
        entropy_gradient: the entropy has a gradient, which costs part of the backward pass.
        sum_pi_squared: sum of squared probabilities, without gradient.
        last_values: a value model's value after the last token of each sequence.
        logprobs_of: name of a (T, K) int64 column; also return the logprobs of these tokens at each
            position, with gradient. Excludes `num_top` (ValueError).
        num_top: K most likely tokens of each predicting distribution, without gradient; 0: none.
        top_below: consider only token ids below this for `num_top`, those that another model has
            too; None: all. Logprobs are still normalized over all tokens.
    """

    entropy: bool = False
    entropy_gradient: bool = True
    sum_pi_squared: bool = False
    last_values: bool = False
    logprobs_of: str | None = None
    num_top: int = 0
    top_below: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs_of is not None and self.num_top:
            raise ValueError(
                f"readouts: got logprobs_of={self.logprobs_of!r} and num_top={self.num_top}; "
                "need one of them; run the model twice"
            )


ONLY_LOGPROBS = Readouts()


@dataclass(frozen=True)
class ModelOutputs:
    """Result of a forward pass over a `TokenBatch`; readouts that were not requested are None.

    Attributes:
        logprobs_T: (T,) float32, with gradient in training; 0 at the first token of a sequence.
        entropy_T: (T,) float32 entropy of the predicting distribution.
        values_T: (T,) float32, value of the state in which each token is chosen.
        sum_pi_squared_T: (T,) float32, without gradient.
        last_values_B: (B,) float32, value after the last token of each sequence.
        topk_logprobs_TK: (T, K) float32 of the tokens of `Readouts.logprobs_of` (with gradient in
            training) or of the most likely ones; 0 at the first token of a sequence.
        topk_ids_TK: (T, K) int64, most likely tokens in descending order, ties by lowest id; 0 at
            the first token of a sequence.
    """

    logprobs_T: Tensor
    entropy_T: Tensor | None = None
    values_T: Tensor | None = None
    sum_pi_squared_T: Tensor | None = None
    last_values_B: Tensor | None = None
    topk_logprobs_TK: Tensor | None = None
    topk_ids_TK: Tensor | None = None


@dataclass(frozen=True)
class GlobalCounts:
    """Denominators of a loss over one optimizer step: all ranks, all micro-batches.

    Attributes:
        num_tokens: tokens with loss mask 1.
        num_sequences: sequences with at least one such token.
        num_units: units with at least one such sequence.
        extras: results of the loss function's `extras` over the whole step, by name.
    """

    num_tokens: int
    num_sequences: int
    num_units: int = 0
    extras: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """Result of a loss function for one micro-batch.

    Attributes:
        loss: scalar, this micro-batch's share of the global loss: a sum divided by a *global*
            count. The sum over micro-batches and ranks is the loss of the step. The engine applies
            the backend's data-parallel factor; a loss function never does.
        metrics: scalars that are summed over micro-batches and ranks.
        maxima: scalars that are reduced by maximum over micro-batches and ranks.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainMetrics:
    """Result of one optimizer step, equal on every rank.

    Attributes:
        grad_norm: global L2 norm before clipping.
        num_tokens: tokens processed, not only those in the loss.
        metrics: the loss function's metrics, reduced.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PoisonedUpdate:
    """A skipped optimizer step, equal on every rank; `reason` names what was not finite."""

    reason: str
