"""Weights of the transformers model into and out of the parameters of the ranks.

Promises: each rank reads only its blocks of the files; a missing weight or another shape is an
error, except that the head of a value model may be absent and then starts at 0. Streaming holds
one whole tensor at a time, on every rank, whatever the layout.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from engines import collectives
from engines.training.backends.megatron.pieces import Block, Part
from engines.training.spec import VALUE_HEAD
from engines.training.weight_shards import HeldPart, WeightPlace
from infra.errors import ConfigError

Values = Callable[[Part, Block], Tensor]
"""A block's values: those of its parameter, or those with an adapter merged in."""


class HubFiles:
    """Blocks of the weights in a Hugging Face directory of safetensors files.

    Args:
        hf_dir: the directory.
    """

    def __init__(self, hf_dir: Path) -> None:
        self._hf_dir = hf_dir
        self._file: dict[str, Path] = {}
        for file in sorted(hf_dir.glob("*.safetensors")):
            with safe_open(file, framework="pt") as handle:
                self._file.update(dict.fromkeys(handle.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def read(self, block: Block) -> Tensor:
        """One block, on the CPU.

        Args:
            block: by its name on the hub.

        Returns:
            Of the block's shape.

        Raises:
            ConfigError: the weight is absent or has another shape.
        """
        if block.name not in self._file:
            raise ConfigError("model.path", f"{self._hf_dir} has no weight {block.name}")
        place = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.shape, strict=True))
        with safe_open(self._file[block.name], framework="pt") as handle:
            stored = handle.get_slice(block.name)
            shape = tuple(stored.get_shape())
            if shape != block.whole:
                raise ConfigError(
                    "model.path",
                    f"{self._hf_dir}: {block.name} has shape {shape}; need {block.whole}",
                )
            return stored[place]


@torch.no_grad()
def load_hub_weights(parts: Sequence[Part], hf_dir: Path) -> None:
    """Fill parameters from a Hugging Face directory.

    Args:
        parts: of this rank.
        hf_dir: of the model.

    Raises:
        ConfigError: a weight is absent or has another shape.
    """
    files = HubFiles(hf_dir)
    for part in parts:
        if ".lora_" in part.name:
            continue
        part.parameter.zero_()  # rows that pad the vocabulary, a new value head
        for block in part.hub:
            if block.name in files or not block.name.startswith(VALUE_HEAD):
                block.write(part.parameter, files.read(block))


@dataclass(frozen=True)
class _Share:
    """A block of a weight on one rank, as every rank knows it."""

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class WeightStream:
    """Streams whole weights. Collective.

    Args:
        parts: of this rank.
        device: where the weights are.
        names: which blocks; those on the hub hold no adapter.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        device: torch.device,
        names: Literal["hub", "stored"] = "hub",
    ) -> None:
        self._device = device
        self._own: dict[tuple[str, tuple[int, ...]], tuple[Part, Block]] = {}
        mine: list[list[object]] = []
        for part in parts:
            blocks = part.hub if names == "hub" else part.stored
            for block in blocks if part.is_primary else ():
                self._own[block.name, block.offsets] = part, block
                mine.append([block.name, block.whole, block.offsets, block.shape])
        self._plan: dict[str, tuple[tuple[int, ...], list[_Share]]] = {}
        for rank, rows in enumerate(_from_every_rank(mine, device)):
            for name, whole, offsets, shape in rows:
                _, shares = self._plan.setdefault(name, (tuple(whole), []))
                share = _Share(rank, tuple(offsets), tuple(shape))
                # Ranks with different data hold the same blocks: the first of them sends.
                if all(known.offsets != share.offsets for known in shares):
                    shares.append(share)

    @property
    def names(self) -> list[str]:
        """All names, in the order of the stream."""
        return list(self._plan)

    def held(self, values: Values) -> list[HeldPart]:
        """The blocks of this rank, without any exchange.

        Args:
            values: of each block.

        Returns:
            In the order of the rank's parts.
        """
        return [
            HeldPart(
                WeightPlace(block.name, block.whole, block.offsets, block.shape),
                lambda part=part, block=block: values(part, block).contiguous(),
            )
            for part, block in self._own.values()
        ]

    def walk(self, values: Values, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole.

        Args:
            values: what to send for each block.
            dtype: of those values.

        Yields:
            tuple[str, Tensor]: name on the hub, and tensor on the device.
        """
        for name in self._plan:
            yield name, self._whole(name, values, dtype)

    @torch.no_grad()
    def _whole(self, name: str, values: Values, dtype: torch.dtype) -> Tensor:
        shape, shares = self._plan[name]
        if shares[0].shape == shape:
            return self._broadcast(name, shares[0], values, dtype)
        whole = self._empty(shape, dtype)
        for share in shares:
            ends = zip(share.offsets, share.shape, strict=True)
            whole[tuple(slice(o, o + n) for o, n in ends)] = self._broadcast(
                name, share, values, dtype
            )
        return whole

    def _broadcast(self, name: str, share: _Share, values: Values, dtype: torch.dtype) -> Tensor:
        if share.rank == collectives.rank():
            sent = values(*self._own[name, share.offsets]).contiguous()
        else:
            sent = self._empty(share.shape, dtype)
        if collectives.world_size() > 1:
            collectives.broadcast(sent, src=share.rank)
        return sent

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _from_every_rank(value: object, device: torch.device) -> list[Any]:
    """What each rank holds, in rank order, on every rank."""
    world = dist.group.WORLD
    if world is None:
        return [json.loads(json.dumps(value))]
    return [
        collectives.broadcast_json(value, rank, world, device)
        for rank in range(collectives.world_size())
    ]
