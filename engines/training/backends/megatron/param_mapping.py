"""The blocks of transformers weights in the parameters of a Megatron-Core rank, and their transfer.

Megatron-Core interleaves queries, keys and values, stacks gate and up projections, pads the
vocabulary and shards; each such part is a rectangular block of one transformers weight. Storing,
loading and streaming use these blocks, so that a checkpoint does not depend on layout or backend.

Promises: each rank reads only its blocks of the files; a missing weight is an error, but a value
head may be absent and starts at 0. Streaming holds one whole tensor at a time.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from torch import Tensor, nn

from engines import collectives
from engines.training.backends.megatron.layout import Layout
from engines.training.backends.megatron.model import Architecture, head_size
from engines.training.backends.megatron.parallel import Place
from engines.training.spec import VALUE_HEAD
from engines.training.weight_shards import HeldPart
from engines.weight_places import WeightPlace
from infra.errors import ConfigError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"(local_experts\.)(\d+)(\.)")
_HUB_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_WORD_WEIGHTS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Block(WeightPlace):
    """A block of a whole weight; `view` selects it in a tensor of the parameter's shape."""

    view: Callable[[Tensor], Tensor]

    def read(self, tensor: Tensor) -> Tensor:
        """Return the block of a tensor of the parameter's shape."""
        return self.view(tensor).reshape(self.shape)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write the block's values into a tensor of the parameter's shape."""
        part = self.view(tensor)
        part.copy_(values.reshape(part.shape))


@dataclass(frozen=True)
class Part:
    """A parameter of this rank.

    Attributes:
        stored: blocks by name in the transformers module, which stacks experts.
        hub: blocks by name on the hub.
        is_expert: replicated over other ranks than dense weights.
        is_cut: tensor-parallel ranks hold different parts of it; True for all experts.
        is_primary: this rank sends it, for all tensor-parallel ranks and stages with equal values.
        is_first: this is the first of the tensor-parallel ranks.
    """

    name: str
    parameter: nn.Parameter
    stored: tuple[Block, ...]
    hub: tuple[Block, ...]
    is_expert: bool
    is_cut: bool
    is_primary: bool
    is_first: bool


def parts_of(
    chunks: list[nn.Module], architecture: Architecture, layout: Layout, place: Place
) -> list[Part]:
    """Return all parameters of this rank, in the order of the pieces."""
    finder = _Finder(architecture, layout, place)
    return [part for chunk in chunks for part in finder.parts(chunk)]


class _Finder:
    def __init__(self, architecture: Architecture, layout: Layout, place: Place) -> None:
        self._architecture, self._layout, self._place = architecture, layout, place
        self._config = architecture.config

    def parts(self, chunk: nn.Module) -> Iterator[Part]:
        first_layer = get_transformer_layer_offset(
            self._config, vp_stage=getattr(chunk, "vp_stage", None)
        )
        num_experts = self._config.num_moe_experts or 0
        first_expert = self._place.expert * (num_experts // self._layout.expert)
        is_tied = getattr(chunk, "share_embeddings_and_output_weights", False)
        for local_name, parameter in chunk.named_parameters():
            if ".lora_" in local_name:
                continue
            name = _LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", local_name)
            name = _LOCAL_EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}{m[3]}", name)
            blocks = tuple(self._blocks(name, parameter))
            is_copy = is_tied and name == "output_layer.weight"
            is_expert = ".experts." in name
            is_cut = is_expert or not blocks or any(b.shape != b.whole for b in blocks)
            yield Part(
                name,
                parameter,
                self._experts(blocks) if is_expert else blocks,
                blocks,
                is_expert,
                is_cut,
                not is_copy and (is_cut or self._place.tensor == 0),
                self._place.tensor == 0,
            )

    def _blocks(self, name: str, parameter: nn.Parameter) -> Iterator[Block]:
        hub_names = [name] if name.startswith(VALUE_HEAD) else self._architecture.hub_names(name)
        if name in _WORD_WEIGHTS:
            yield from self._word_rows(hub_names[0], parameter)
        elif name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
            yield from self._attention(hub_names, parameter)
        elif ".linear_fc1." in name and len(hub_names) == 2:
            yield from self._gate_and_up(hub_names, parameter, is_cut=".experts." not in name)
        elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            yield self._columns(hub_names[0], parameter)
        else:
            yield _whole(hub_names[0], parameter)

    def _word_rows(self, hub_name: str, parameter: nn.Parameter) -> Iterator[Block]:
        rows, width = parameter.shape
        vocabulary = self._architecture.hub.vocab_size
        first = self._place.tensor * rows
        real = min(rows, vocabulary - first)
        if real > 0:  # otherwise all rows are padding
            yield Block(
                hub_name, (vocabulary, width), (first, 0), (real, width), lambda t: t[:real]
            )

    def _attention(self, hub_names: list[str], parameter: nn.Parameter) -> Iterator[Block]:
        """Yield the rows of each group: its queries, its key, its value."""
        hub, size = self._architecture.hub, head_size(self._architecture.hub)
        groups = hub.num_key_value_heads // self._layout.tensor
        queries = hub.num_attention_heads // hub.num_key_value_heads * size
        rest = tuple(parameter.shape[1:])
        start = 0
        for name, rows in zip(hub_names, (queries, size, size), strict=True):
            part = slice(start, start + rows)
            yield Block(
                name,
                (hub.num_key_value_heads * rows, *rest),
                (self._place.tensor * groups * rows, *(0 for _ in rest)),
                (groups * rows, *rest),
                lambda t, part=part: t.view(groups, queries + 2 * size, *rest)[:, part],
            )
            start += rows

    def _gate_and_up(
        self, hub_names: list[str], parameter: nn.Parameter, *, is_cut: bool
    ) -> Iterator[Block]:
        rows, width = parameter.shape[0] // 2, parameter.shape[1]
        cuts, rank = (self._layout.tensor, self._place.tensor) if is_cut else (1, 0)
        for i, name in enumerate(hub_names):
            yield Block(
                name,
                (rows * cuts, width),
                (rank * rows, 0),
                (rows, width),
                lambda t, i=i: t.view(2, rows, width)[i],
            )

    def _columns(self, hub_name: str, parameter: nn.Parameter) -> Block:
        rows, columns = parameter.shape
        is_expert = _HUB_EXPERT.match(hub_name) is not None
        cuts, rank = (1, 0) if is_expert else (self._layout.tensor, self._place.tensor)
        return Block(
            hub_name, (rows, columns * cuts), (0, rank * columns), (rows, columns), lambda t: t
        )

    def _experts(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """Return an expert's projection as a part of the stack: gate above up, or down."""
        stem, expert, kind = _HUB_EXPERT.findall(blocks[0].name)[0]
        name = f"{stem}.down_proj" if kind == "down" else f"{stem}.gate_up_proj"
        shape = (1, sum(block.shape[0] for block in blocks), blocks[0].shape[1])
        whole = (self._config.num_moe_experts or 0, *shape[1:])
        return (Block(name, whole, (int(expert), 0, 0), shape, lambda t: t),)


def _whole(name: str, parameter: nn.Parameter) -> Block:
    shape = tuple(parameter.shape)
    return Block(name, shape, (0,) * len(shape), shape, lambda t: t)


@torch.no_grad()
def load_hub_weights(parts: Sequence[Part], hf_dir: Path) -> None:
    """Load parameters from a Hugging Face directory of safetensors files.

    Raises:
        ConfigError: a weight is absent or has another shape.
    """
    files: dict[str, Path] = {}
    for file in sorted(hf_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            files.update(dict.fromkeys(handle.keys(), file))
    for part in (part for part in parts if ".lora_" not in part.name):
        part.parameter.zero_()  # for padded vocabulary rows and a new value head
        for block in part.hub:
            if block.name in files:
                block.write(part.parameter, _read(files[block.name], block))
            elif not block.name.startswith(VALUE_HEAD):
                raise ConfigError("model.path", f"{hf_dir} has no weight {block.name}")


def _read(file: Path, block: Block) -> Tensor:
    with safe_open(file, framework="pt") as handle:
        stored = handle.get_slice(block.name)
        shape = tuple(stored.get_shape())
        if shape != block.whole:
            raise ConfigError(
                "model.path",
                f"{file.parent}: {block.name} has shape {shape}; need {block.whole}",
            )
        return stored[block.slices]


Values = Callable[[Part, Block], Tensor]
"""Returns a block's values, with or without an adapter merged in."""


class WeightStream:
    """Streams whole weights by hub name. Collective."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._device = device
        self._own = {
            WeightPlace(block.name, block.whole, block.offsets, block.shape): (part, block)
            for part in parts
            for block in (part.hub if part.is_primary else ())
        }
        # By name: the blocks of each weight and their sending rank.
        self._plan: dict[str, dict[WeightPlace, int]] = {}
        places = [astuple(place) for place in self._own]
        for rank, rows in enumerate(collectives.gather_values(places)):
            for name, *sizes in rows:
                # Data-parallel ranks hold the same blocks: the first one sends.
                self._plan.setdefault(name, {}).setdefault(WeightPlace.of(name, *sizes), rank)

    def held(self, values: Values) -> list[HeldPart]:
        """Return the blocks of this rank's primary parts, without communication."""
        return [
            HeldPart(place, lambda part=part, block=block: values(part, block).contiguous())
            for place, (part, block) in self._own.items()
        ]

    def walk(self, values: Values, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight's hub name and whole tensor, on the device."""
        for name in self._plan:
            yield name, self._whole(name, values, dtype)

    @torch.no_grad()
    def _whole(self, name: str, values: Values, dtype: torch.dtype) -> Tensor:
        senders = self._plan[name]
        first = next(iter(senders))
        if first.shape == first.whole:
            return self._broadcast(first, senders[first], values, dtype)
        whole = torch.empty(first.whole, dtype=dtype, device=self._device)
        for place, sender in senders.items():
            whole[place.slices] = self._broadcast(place, sender, values, dtype)
        return whole

    def _broadcast(
        self, place: WeightPlace, sender: int, values: Values, dtype: torch.dtype
    ) -> Tensor:
        if sender == collectives.rank():
            sent = values(*self._own[place]).contiguous()
        else:
            sent = torch.empty(place.shape, dtype=dtype, device=self._device)
        if collectives.world_size() > 1:
            collectives.broadcast(sent, src=sender)
        return sent
