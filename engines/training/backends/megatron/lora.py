"""Low-rank adapters (LoRA, arXiv:2106.09685) for Megatron-Core's fused, sharded matrices.

One pair A, B per weight of the transformers module (q, k, v, gate and up each have one) with PEFT's
names, initial values and results, so that adapters move between backends.
Not covered: DoRA, adapters of experts and routers (PEFT has none there either).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.nn.functional import linear

from engines.config.training import LoraConfig
from engines.training.backends.megatron.param_mapping import Block, Part
from engines.training.backends.transformers.adapters import StoredAdapter, wrapped_name
from engines.training.spec import VALUE_HEAD
from infra.errors import ConfigError

_SETTING = "training.lora"
_COLUMNS_CUT = ("linear_proj.weight", "linear_fc2.weight")
_ROWS_CUT = ("linear_qkv.weight", "linear_fc1.weight")

_EXCHANGES = {
    (False, False): tensor_parallel.reduce_from_tensor_model_parallel_region,
    (False, True): tensor_parallel.reduce_scatter_to_sequence_parallel_region,
    (True, False): tensor_parallel.copy_to_tensor_model_parallel_region,
    (True, True): tensor_parallel.gather_from_sequence_parallel_region,
}
"""(rows of the matrix are cut, sequence parallel) -> exchange of ranks between A and B."""


def _target(block: Block) -> str:
    return block.name.split(".")[-2]


class Adapter(nn.Module):
    """The pairs A, B of one fused matrix; `delta` is added to the matrix's output."""

    def __init__(
        self, part: Part, targets: Sequence[str], lora: LoraConfig, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.enabled = True
        self.scaling = lora.alpha / lora.rank
        self._sequence_parallel = sequence_parallel
        self._is_row_cut = part.name.endswith(_ROWS_CUT)
        self._blocks = part.stored
        like = torch.empty(part.parameter.shape, device="meta")
        # Per block: (groups, rows of each) or (rows,), as the matrix interleaves them.
        self._rows = [tuple(block.view(like).shape[:-1]) for block in self._blocks]
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for block in self._blocks:
            name = _target(block)
            if name in targets:
                rows, columns = block.shape
                self.a[name] = nn.Parameter(part.parameter.new_empty(lora.rank, columns))
                self.b[name] = nn.Parameter(part.parameter.new_zeros(rows, lora.rank))
                self._mark(self.a[name], is_cut=not self._is_row_cut)
                self._mark(self.b[name], is_cut=self._is_row_cut)

    def _mark(self, parameter: Tensor, *, is_cut: bool) -> None:
        marked = cast(Any, parameter)
        marked.tensor_model_parallel = is_cut
        # A replicated parameter sees a slice of the tokens on each rank.
        marked.sequence_parallel = self._sequence_parallel and not is_cut

    def delta(self, x: Tensor) -> Tensor:
        """Return the pairs' output for the matrix's input `x`, (S, 1, inputs)."""
        exchange = _EXCHANGES[self._is_row_cut, self._sequence_parallel]
        found = {
            name: linear(exchange(linear(x, a)), self.b[name]) * self.scaling
            for name, a in self.a.items()
        }
        if not self._is_row_cut:
            return found[_target(self._blocks[0])]
        # Order the outputs of q, k, v or gate, up as in the fused matrix.
        like = next(iter(found.values()))
        groups: list[Tensor] = []
        for block, rows in zip(self._blocks, self._rows, strict=True):
            part = found.get(_target(block))
            part = like.new_zeros(*like.shape[:-1], block.shape[0]) if part is None else part
            groups.append(part.unflatten(-1, rows))
        return torch.cat(groups, dim=-1).flatten(like.dim() - 1)

    @torch.no_grad()
    def merged_into(self, block: Block, weight: Tensor) -> Tensor:
        """Return float32 W + scaling * B @ A of one block; W itself without a pair."""
        name = _target(block)
        if name not in self.a:
            return weight
        return StoredAdapter(self.a[name], self.b[name], self.scaling).merged_into(weight)

    def parts(self, part: Part) -> Iterator[Part]:
        """Yield A and B as parts of the model, by PEFT's names."""
        for block in self._blocks:
            name, stem = _target(block), block.name.removesuffix(".weight")
            if name in self.a:
                a, b, rank = self.a[name], self.b[name], self.a[name].shape[0]
                (rows, columns), (row, column) = block.whole, block.offsets
                yield _part(part, f"{stem}.lora_A.default.weight", a, (rank, columns), (0, column))
                yield _part(part, f"{stem}.lora_B.default.weight", b, (rows, rank), (row, 0))


def _part(
    part: Part, name: str, parameter: nn.Parameter, whole: tuple[int, ...], at: tuple[int, ...]
) -> Part:
    block = Block(name, whole, at, tuple(parameter.shape), lambda t: t)
    is_cut = block.shape != whole
    # If only the matrix is sharded, all tensor-parallel ranks hold equal values.
    is_primary = part.is_primary and (is_cut or part.is_first)
    return Part(name, parameter, (block,), (), False, is_cut, is_primary, part.is_first)


def add_adapters(
    chunks: Sequence[nn.Module], parts: Sequence[Part], lora: LoraConfig, *, sequence_parallel: bool
) -> tuple[list[Part], dict[nn.Parameter, Adapter]]:
    """Freeze all weights except a value head, and add adapters to the target matrices.

    Returns all parts, renamed as by PEFT, and the adapter of each wrapped matrix.

    Raises:
        ConfigError: a target is in no layer, or DoRA is requested.
    """
    if lora.use_dora:
        raise ConfigError(
            f"{_SETTING}.use_dora", "got true; megatron has no DoRA; use training.backend: fsdp2"
        )
    matrices = {
        part.parameter: part
        for part in parts
        if part.name.endswith((*_ROWS_CUT, *_COLUMNS_CUT)) and not part.is_expert
    }
    known = {_target(block) for part in matrices.values() for block in part.stored}
    targets = known if lora.target_modules == "all-linear" else set(lora.target_modules)
    if targets - known:
        raise ConfigError(
            f"{_SETTING}.target_modules",
            f"got {', '.join(sorted(targets - known))}; need some of {', '.join(sorted(known))}",
        )
    for part in parts:
        # A value head starts at 0: frozen, it would pass no gradient.
        part.parameter.requires_grad_(part.name.startswith(VALUE_HEAD))
    adapters: dict[nn.Parameter, Adapter] = {}
    for module in [module for chunk in chunks for module in chunk.modules()]:
        matrix = matrices.get(cast(Any, getattr(module, "weight", None)))
        if matrix is not None and any(_target(block) in targets for block in matrix.stored):
            adapter = Adapter(matrix, sorted(targets), lora, sequence_parallel=sequence_parallel)
            module.add_module("lora_adapter", adapter)
            module.register_forward_hook(_add_delta)
            adapters[matrix.parameter] = adapter
    return list(_with_adapters(parts, adapters)), adapters


def _add_delta(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
    adapter, (out, bias) = cast(Any, module).lora_adapter, output
    return (out + adapter.delta(inputs[0]) if adapter.enabled else out), bias


def _with_adapters(
    parts: Sequence[Part], adapters: dict[nn.Parameter, Adapter]
) -> Iterator[Part]:  # fmt: skip
    for part in parts:
        adapter = adapters.get(part.parameter)
        if adapter is None:
            yield part
        else:
            stored = (
                replace(block, name=wrapped_name(block.name) if _target(block) in adapter.a
                        else block.name)
                for block in part.stored
            )  # fmt: skip
            yield replace(part, stored=tuple(stored))
            yield from adapter.parts(part)
