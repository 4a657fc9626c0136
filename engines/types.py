"""The data plane's boundary types: frozen, with shapes; those of sampling are of `requests`.

Letters: B sequences, T tokens of all sequences laid end to end, K numbers for each, V vocabulary,
D model width.

Alignment, everywhere: the value of a per-token column at position t speaks of *predicting*
token t from the tokens before it in its sequence. So `logprobs_T[t] = log p(id_t | ids_<t)`,
and the first position of every sequence has no prediction: its logprob is 0 and its loss mask 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engines.images import ImagePatches
from engines.requests import Completion as Completion
from engines.requests import RolloutRequest as RolloutRequest
from engines.requests import SamplingParams as SamplingParams
from engines.requests import StructuredOutput as StructuredOutput
from engines.selection import RowSelection


@dataclass(frozen=True)
class TokenBatch:
    """B sequences laid end to end, without padding.

    Attributes:
        input_ids_T: (T,) int64, or int32 where nothing computes with it, see `widened`.
        cu_seqlens: (B + 1,) int32, cumulative lengths; starts at 0, ends at T.
        columns: per-token columns by name, each (T,) or (T, K), of any dtype; float32 unless said
            otherwise. The names in use: `loss_mask` (1 where the token is trained on; bool in a
            batch that is to be `widened`), `advantages`, `old_logprobs` (training engine, before
            the update), `rollout_logprobs`, `ref_logprobs`.
        images: of the sequences, for a model that sees; None when there are none. Their
            placeholder tokens are in `input_ids_T`.
        rows: values of whole sequences by name, each (B,) or (B, K), of any dtype.
        unit_B: (B,) int64, which unit each sequence is of: a pair, a group. Those of one unit
            stay together wherever the batch is cut; None: each is a unit of its own.
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
        """Lay sequences end to end; each column holds one list per sequence, of its length."""
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

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids_T.numel()

    @property
    def lengths_B(self) -> Tensor:
        """(B,) int32 lengths of the sequences."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def sequence_index_T(self) -> Tensor:
        """(T,) int64: which sequence each token belongs to."""
        index = torch.arange(self.num_sequences, device=self.input_ids_T.device)
        return index.repeat_interleave(self.lengths_B.to(torch.int64))

    @property
    def position_ids_T(self) -> Tensor:
        """(T,) int64: position of each token inside its sequence."""
        starts_T = self.cu_seqlens[:-1].to(torch.int64)[self.sequence_index_T]
        return torch.arange(self.num_tokens, device=self.input_ids_T.device) - starts_T

    @property
    def units(self) -> list[list[int]]:
        """The sequences of each unit, in the order in which the units first come."""
        if self.unit_B is None:
            return [[index] for index in range(self.num_sequences)]
        found: dict[int, list[int]] = {}
        for index, unit in enumerate(self.unit_B.tolist()):
            found.setdefault(unit, []).append(index)
        return list(found.values())

    def token_index_T(self, sequences: Sequence[int]) -> Tensor:
        """(T,) int64: places of the tokens of the named sequences, in the given order."""
        device = self.input_ids_T.device
        chosen = torch.tensor(list(sequences), dtype=torch.int64, device=device)
        lengths_B = self.lengths_B[chosen].to(torch.int64)
        shift_B = self.cu_seqlens[:-1][chosen].to(torch.int64) - (lengths_B.cumsum(0) - lengths_B)
        num_tokens = int(lengths_B.sum())
        return torch.arange(num_tokens, device=device) + shift_B.repeat_interleave(lengths_B)

    def select(self, sequences: Sequence[int]) -> "TokenBatch":
        """The named sequences, in the given order.

        Args:
            sequences: their indices; of a unit all or none.

        Returns:
            A batch of them, with all that belongs to them.

        Raises:
            ValueError: it takes a unit apart.
        """
        index_T = self.token_index_T(sequences)
        chosen = torch.tensor(list(sequences), dtype=torch.int64, device=self.input_ids_T.device)
        if self.unit_B is not None:
            self._check_whole_units(self.unit_B, chosen)
        ends_B = self.lengths_B[chosen].to(torch.int64).cumsum(0)
        tokens = RowSelection(index_T, self.cu_seqlens, sequences)
        rows = RowSelection(chosen, torch.arange(len(self.cu_seqlens)), sequences)
        return TokenBatch(
            tokens.of(self.input_ids_T),
            torch.cat([ends_B.new_zeros(1), ends_B]).to(torch.int32),
            {name: tokens.of(column) for name, column in self.columns.items()},
            self.images.select(sequences) if self.images is not None else None,
            {name: rows.of(row) for name, row in self.rows.items()},
            rows.of(self.unit_B) if self.unit_B is not None else None,
        )

    @staticmethod
    def _check_whole_units(unit_B: Tensor, chosen: Tensor) -> None:
        taken = unit_B[chosen]
        of_them = torch.isin(unit_B, taken)
        if int(of_them.sum()) != chosen.numel():
            kept = torch.ones_like(unit_B, dtype=torch.bool)
            kept[chosen] = False
            apart = unit_B[kept & of_them].tolist()
            raise ValueError(f"units are taken apart or repeated: {sorted({*apart})[:5]}")

    def with_columns(self, **columns: Tensor) -> "TokenBatch":
        """The same tokens with columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def with_rows(self, **rows: Tensor) -> "TokenBatch":
        """The same sequences with rows added or replaced."""
        return replace(self, rows={**self.rows, **rows})

    def widened(self) -> "TokenBatch":
        """The same batch as models and losses read it: ids int64, `loss_mask` float32.

        A driver holds a step of some 10^8 tokens as int32 and bool, and each rank widens its share.
        """
        mask = self.columns.get("loss_mask")
        columns = {} if mask is None else {"loss_mask": mask.float()}
        return replace(self.with_columns(**columns), input_ids_T=self.input_ids_T.long())

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The same batch on another device."""
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
    """What is wanted of a model beside log-probabilities or values; never its logits.

    Attributes:
        entropy: of each predicting distribution, in nats.
        entropy_gradient: with gradient, which costs a part of the backward pass; False where the
            loss only reports entropies.
        sum_pi_squared: sum of its squared probabilities, without gradient.
        last_values: of a value model, the value behind the last token of each sequence.
        logprobs_of: a column of the batch, (T, K) int64: log-probabilities of these tokens too,
            each in the place of the token that was sampled, with gradient.
        num_top: K of the most likely tokens of each predicting distribution, without gradient;
            0: none.
        top_below: of `num_top` only tokens below this id, those that another model has too; None:
            of all. The distribution is that over all of them.

    Raises:
        ValueError: both `logprobs_of` and `num_top`.
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
    """What a forward pass yields for a `TokenBatch`; None for what was not asked for.

    Attributes:
        logprobs_T: (T,) float32, with gradient while training; 0 at the first token of a sequence.
        entropy_T: (T,) float32 of the predicting distribution.
        values_T: (T,) float32 of a value model: of the state in which each token is chosen.
        sum_pi_squared_T: (T,) float32 sum of squared probabilities, without gradient.
        last_values_B: (B,) float32 of a value model: behind the last token of each sequence.
        topk_logprobs_TK: (T, K) float32 of the tokens that `logprobs_of` names, with gradient
            while training, or of the most likely ones; 0 where `logprobs_T` is.
        topk_ids_TK: (T, K) int64, the most likely tokens, the likeliest first, of equals the
            lowest id; 0 where nothing is predicted.
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
        extras: what the loss function's `extras` found in the whole step, by name.
    """

    num_tokens: int
    num_sequences: int
    num_units: int = 0
    extras: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns for one micro-batch.

    Attributes:
        loss: scalar; this micro-batch's share of the global loss, i.e. a sum divided by a
            *global* count. Summed over micro-batches and ranks it is the loss of the step.
            The engine applies the backend's data-parallel factor; a loss function never does.
        metrics: scalars that, like the loss, sum to their value over micro-batches and ranks.
        maxima: scalars of which the largest over micro-batches and ranks is meant.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainMetrics:
    """Result of one optimizer step, equal on every rank.

    Attributes:
        loss: global loss.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of this step.
        num_tokens: tokens processed (not only those in the loss).
        metrics: everything the loss function reported, reduced.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PoisonedUpdate:
    """An optimizer step that was not taken: the weights are as before. Equal on every rank.

    Attributes:
        reason: what was no finite number.
    """

    reason: str
