"""Forward and backward passes through the pieces of a model, in Megatron-Core's schedules.

Gradients are plain sums over micro-batches and ranks. The last stage computes the loss once per
micro-batch, on outputs of whole rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from engines import collectives
from engines.training.backends.megatron.layout import Layout
from engines.training.backends.megatron.model import PackedRow
from engines.training.backends.megatron.parallel import Place
from engines.training.backends.megatron.router_replay import RouteMemory, RowRoutes
from engines.training.model.attention import Packing, slice_sequence
from engines.training.model.linear_logprobs import targets_of
from engines.training.outputs import model_outputs, read_positions
from engines.training.spec import EngineSpec, ScaledLoss
from engines.training.step.micro_batches import filler
from engines.types import ModelOutputs, Readouts, TokenBatch

Scope = Callable[[], AbstractContextManager[None]]


class Pipeline:
    """Runs the pieces of this rank; without `memory`, routers choose experts."""

    def __init__(
        self,
        spec: EngineSpec,
        layout: Layout,
        place: Place,
        chunks: Sequence[nn.Module],
        memory: RouteMemory | None = None,
    ) -> None:
        self._spec, self._layout, self._place = spec, layout, place
        self._chunks = list(chunks)
        self._memory = memory

    def forward(self, batch: TokenBatch, readouts: Readouts) -> ModelOutputs:
        """Run one forward pass of a batch on the device, with one stage."""
        row, read_N = self._row(batch, readouts)
        return self._outputs(_call(self._chunks[0], row), batch, read_N, readouts)

    def train(
        self,
        batches: Sequence[TokenBatch],
        scaled_loss: ScaledLoss,
        scope: Scope,
        readouts: Readouts,
    ) -> None:
        """Run forward and backward passes of all micro-batches and reduce gradients."""
        self._run(batches, scaled_loss, scope, readouts, forward_only=False)

    def infer(
        self, batches: Sequence[TokenBatch], scope: Scope, readouts: Readouts
    ) -> list[ModelOutputs]:
        """Return the outputs of each micro-batch on the last stage; [] on the others."""
        found: list[ModelOutputs] = []

        def keep(outputs: ModelOutputs, batch: TokenBatch) -> Tensor:
            found.append(outputs)
            return outputs.logprobs_T.new_zeros(())

        if self._memory is not None:
            self._memory.begin_inference()
        num_fillers = self._run(batches, keep, scope, readouts, forward_only=True)
        return found[num_fillers:]

    def _run(
        self,
        batches: Sequence[TokenBatch],
        on_outputs: ScaledLoss,
        scope: Scope,
        readouts: Readouts,
        *,
        forward_only: bool,
    ) -> int:
        """Run the schedule; return the number of fillers, which come first."""
        # The interleaved schedule needs a multiple of the number of stages.
        missing = -len(batches) % self._layout.pipeline if self._layout.virtual > 1 else 0
        batches = [filler(batches[0]).batch for _ in range(missing)] + list(batches)
        device = self._spec.platform.device()
        for chunk in self._chunks:
            chunk.train(not forward_only)  # enables recomputation; there is no dropout

        def step(iterator: Iterator[TokenBatch], chunk: nn.Module) -> Any:
            batch = next(iterator).to(device)
            row, read_N = self._row(batch, readouts)
            piece = self._chunks.index(chunk)
            row = self._with_routes(row, piece, batch, record=forward_only)
            with scope():
                out = _call(chunk, row)
            if self._memory is not None and row.routes is not None and forward_only:
                self._memory.record(piece, batch, row.routes)

            def loss(output: Tensor) -> Any:
                outputs = self._outputs(output, batch, read_N, readouts)
                return (
                    on_outputs(outputs, batch),
                    torch.zeros((), dtype=torch.int, device=device),
                    {},
                )

            return out, loss

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(batches),
            seq_length=1,  # unused: shapes of micro-batches differ and are communicated
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return missing

    def _row(self, batch: TokenBatch, readouts: Readouts) -> tuple[PackedRow, Tensor]:
        """Return this context rank's slice, and the places of the batch that it computes."""
        size = self._layout.context
        part = slice_sequence(
            batch, self._place.context, size, multiple=self._layout.tokens_multiple
        )
        read_N = read_positions(batch, readouts, part)
        row = PackedRow(
            part.input_ids_S,
            part.position_ids_S,
            Packing.from_cu_seqlens(
                part.cu_seqlens, self._place.context_group if size > 1 else None
            ),
            read_N - 1 - part.start,
            targets_of(batch, read_N, self._spec.temperature, readouts),
            self._spec.training.chunked_logprobs,
        )
        return row, read_N

    def _with_routes(
        self, row: PackedRow, piece: int, batch: TokenBatch, *, record: bool
    ) -> PackedRow:
        if self._memory is None:
            return row
        num_local = row.input_ids_S.numel()
        routes = RowRoutes() if record else self._memory.repeated(piece, batch, num_local)
        return replace(row, routes=routes)

    def _outputs(
        self, rows: Tensor, batch: TokenBatch, read_N: Tensor, readouts: Readouts
    ) -> ModelOutputs:
        """Combine the rows of slices into outputs of the whole row."""
        whole = rows.new_zeros(rows.shape[0], batch.num_tokens + 1).index_copy(1, read_N, rows)
        if self._layout.context > 1:
            whole = cast(Tensor, collectives.SumOverRanks.apply(whole, self._place.context_group))
        return model_outputs(whole, batch, readouts, self._spec.model_type)


def _call(chunk: nn.Module, row: PackedRow) -> Tensor:
    return chunk(
        input_ids=row.input_ids_S.unsqueeze(0),
        position_ids=row.position_ids_S.unsqueeze(0),
        attention_mask=None,
        packed_seq_params=row,
    )
