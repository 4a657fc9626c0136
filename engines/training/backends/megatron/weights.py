"""Transfers weights between the transformers model and the parameters of the ranks.

Each rank reads only its blocks of the files; a missing weight is an error, but a value head may be
absent and starts at 0. Streaming holds one whole tensor at a time.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from engines import collectives
from engines.training.backends.megatron.pieces import Block, Part
from engines.training.spec import VALUE_HEAD
from engines.training.weight_shards import HeldPart
from engines.weight_places import WeightPlace
from infra.errors import ConfigError

Values = Callable[[Part, Block], Tensor]
"""Returns a block's values, with or without an adapter merged in."""


class HubFiles:
    """Blocks of the weights in a Hugging Face directory of safetensors files."""

    def __init__(self, hf_dir: Path) -> None:
        self._hf_dir = hf_dir
        self._file: dict[str, Path] = {}
        for file in sorted(hf_dir.glob("*.safetensors")):
            with safe_open(file, framework="pt") as handle:
                self._file.update(dict.fromkeys(handle.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def read(self, block: Block) -> Tensor:
        """Return the values of a block with a hub name, on the CPU.

        Raises:
            ConfigError: the weight is absent or has another shape.
        """
        if block.name not in self._file:
            raise ConfigError("model.path", f"{self._hf_dir} has no weight {block.name}")
        with safe_open(self._file[block.name], framework="pt") as handle:
            stored = handle.get_slice(block.name)
            shape = tuple(stored.get_shape())
            if shape != block.whole:
                raise ConfigError(
                    "model.path",
                    f"{self._hf_dir}: {block.name} has shape {shape}; need {block.whole}",
                )
            return stored[block.slices]


@torch.no_grad()
def load_hub_weights(parts: Sequence[Part], hf_dir: Path) -> None:
    """Load parameters from a Hugging Face directory.

    Raises:
        ConfigError: a weight is absent or has another shape.
    """
    files = HubFiles(hf_dir)
    for part in parts:
        if ".lora_" in part.name:
            continue
        part.parameter.zero_()  # for padded vocabulary rows and a new value head
        for block in part.hub:
            if block.name in files or not block.name.startswith(VALUE_HEAD):
                block.write(part.parameter, files.read(block))


class WeightStream:
    """Streams whole weights. Collective. Blocks with hub names include no adapter."""

    def __init__(
        self,
        parts: Sequence[Part],
        device: torch.device,
        names: Literal["hub", "stored"] = "hub",
    ) -> None:
        self._device = device
        self._own: dict[WeightPlace, tuple[Part, Block]] = {}
        for part in parts:
            blocks = part.hub if names == "hub" else part.stored
            for block in blocks if part.is_primary else ():
                place = WeightPlace(block.name, block.whole, block.offsets, block.shape)
                self._own[place] = part, block
        mine = [astuple(place) for place in self._own]
        # By name: the blocks of each weight and their sending rank.
        self._plan: dict[str, dict[WeightPlace, int]] = {}
        for rank, rows in enumerate(_from_every_rank(mine, device)):
            for name, *sizes in rows:
                # Data-parallel ranks hold the same blocks: the first one sends.
                self._plan.setdefault(name, {}).setdefault(
                    WeightPlace(name, *map(tuple, sizes)), rank
                )

    @property
    def names(self) -> list[str]:
        """All names, in the order of the stream."""
        return list(self._plan)

    def held(self, values: Values) -> list[HeldPart]:
        """Return the blocks of this rank, without communication."""
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
        whole = self._empty(first.whole, dtype)
        for place, sender in senders.items():
            whole[place.slices] = self._broadcast(place, sender, values, dtype)
        return whole

    def _broadcast(
        self, place: WeightPlace, sender: int, values: Values, dtype: torch.dtype
    ) -> Tensor:
        if sender == collectives.rank():
            sent = values(*self._own[place]).contiguous()
        else:
            sent = self._empty(place.shape, dtype)
        if collectives.world_size() > 1:
            collectives.broadcast(sent, src=sender)
        return sent

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _from_every_rank(value: object, device: torch.device) -> list[Any]:
    world = dist.group.WORLD
    if world is None:
        return [json.loads(json.dumps(value))]
    return [
        collectives.broadcast_json(value, rank, world, device)
        for rank in range(collectives.world_size())
    ]
