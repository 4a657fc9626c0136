"""Router replay (arXiv:2510.11370): training repeats the experts that inference chose.

Old logprobs and the update then use the same experts. Choices are stored by sequence; a sequence
that is not in this rank's memory is routed anew. Gradients reach the router through the scores of
the repeated choice. Not covered: choices of a rollout engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines import collectives
from engines.training.backends.megatron.layout import Layout
from engines.training.backends.megatron.parallel import Place
from engines.types import TokenBatch

_FREE = -1
TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class RowRoutes:
    """Expert choices for this rank's tokens of one row, in one piece of the model.

    Attributes:
        repeated: (S, layers, k) int64; negative: the router chooses. None: record its choices.
        recorded: layer -> (S, k) int64.
    """

    repeated: Tensor | None = None
    recorded: dict[int, Tensor] = field(default_factory=dict)


class LayerRoutes:
    """Replaces the router's top-k in one layer; the layer's attention sets `row` before."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.row: RowRoutes | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, best: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return (S, topk) scores and int64 experts: chosen, recorded or repeated."""
        own_scores, own = best(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.row is None:
            return own_scores, own
        if self.row.repeated is None:
            self.row.recorded[self._layer] = own.detach()
            return own_scores, own
        repeated = self.row.repeated[:, self._layer]
        chosen = torch.where(repeated == _FREE, own, repeated)
        return scores.gather(1, chosen), chosen


class RouteMemory:
    """Stores the expert choices of inferred sequences, for each piece of the model on this rank."""

    def __init__(self, chunks: Sequence[nn.Module], layout: Layout, place: Place) -> None:
        self._layout, self._place = layout, place
        self._topk = int(cast(Any, chunks[0]).config.moe_router_topk)
        self._num_layers: list[int] = []
        for chunk in chunks:
            layers = cast(Any, chunk).decoder.layers
            for number, layer in enumerate(layers):
                routes = LayerRoutes(number)
                layer.mlp.router.router_replay = routes
                layer.self_attention.core_attention.routes = routes
            self._num_layers.append(len(layers))
        self._known: list[dict[bytes, Tensor]] = [{} for _ in chunks]
        self._is_used = False

    def begin_inference(self) -> None:
        """Clear the memory if an optimizer step has used it."""
        if self._is_used:
            self._known, self._is_used = [{} for _ in self._known], False

    def record(self, piece: int, batch: TokenBatch, row: RowRoutes) -> None:
        """Store the choices of a row. Collective over the ranks that share it."""
        local = torch.stack([row.recorded[i] for i in range(self._num_layers[piece])], dim=1)
        row.recorded.clear()
        if self._layout.sequence_parallel:
            local = _concatenated(local, self._place.tensor_group)
        if self._layout.context > 1:
            local = _concatenated(local, self._place.context_group)
        routes = local[: batch.num_tokens].to("cpu", torch.int16).split(batch.lengths_B.tolist())
        self._known[piece].update(zip(_keys(batch), routes, strict=True))

    def repeated(self, piece: int, batch: TokenBatch, num_local: int) -> RowRoutes:
        """Return the choices for this rank's tokens; negative where unknown."""
        self._is_used = True
        size = (num_local * self._layout.context, self._num_layers[piece], self._topk)
        whole = torch.full(size, _FREE, dtype=torch.int64)
        parts = whole[: batch.num_tokens].split(batch.lengths_B.tolist())
        for key, part in zip(_keys(batch), parts, strict=True):
            if key in self._known[piece]:
                part.copy_(self._known[piece][key])
        own = whole.chunk(self._layout.context)[self._place.context]
        if self._layout.sequence_parallel:
            own = own.chunk(self._layout.tensor)[self._place.tensor]
        return RowRoutes(own.to(batch.input_ids_T.device))


def _keys(batch: TokenBatch) -> list[bytes]:
    """Return the tokens of each sequence as bytes: equal sequences are routed alike."""
    ids = batch.input_ids_T.cpu()
    return [part.numpy().tobytes() for part in ids.split(batch.lengths_B.tolist())]


def _concatenated(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    return torch.cat(collectives.all_gather(local, group))
