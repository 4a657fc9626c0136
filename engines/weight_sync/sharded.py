"""Sends a sharded trainer's weights to rollout engines on any machine; each rank sends its parts.

A rank gathers a weight only to merge an adapter, or if its backend streams no shards. `make_plan`
divides the parts of all ranks into rounds: a few weights that fit a bucket, or one larger weight.
The ranks broadcast one after the other in each round, and a receiver assembles one round before it
reads the next. No rank gets more than two buckets ahead of another, so ranks that gather for a part
do so together.
Promises: those of `collective`; every weight is whole in one round; each rank's parts keep its
reading order; checksums of parts are verified on arrival; copies of a part on several ranks are
equal; a round, unless one larger weight, and its parts take at most two buckets on a receiver.
Does not promise that a part was put in its place: the probe after a sync checks that.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from engines.checksum import ChecksumMethod, TensorChecksums, tensor_checksum
from engines.collectives import gather_texts, rank
from engines.errors import WeightSyncError
from engines.weight_places import WeightPlace, WeightShard
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from engines.weight_sync.buckets import Entry, Packer, in_step, received_dtype
from engines.weight_sync.collective import receiving, sending
from engines.weight_sync.communicator import Turns
from engines.weight_sync.rendezvous import (
    GRACE_S,
    RendezvousSource,
    RendezvousTransport,
)
from infra.errors import DeadlineError

PLAN = "plan"


@dataclass(frozen=True)
class ShardedSource(RendezvousSource):
    """Source that reads the parts of all ranks."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""
        with self.join() as rendezvous:
            plan = SendPlan.from_json(
                rendezvous.wait(PLAN, "the trainer's plan of parts", self.timeout_s + GRACE_S)
            )
            checksums = TensorChecksums(self.checksum_method)
            with receiving(rendezvous, plan.turns) as arriving:
                for each in plan.rounds:
                    weights = _assemble(each, arriving, self.checksum_method)
                    for name in each.weights:
                        checksums.add(name, weights[name])
                        yield name, weights.pop(name)
                for entry, _ in arriving:
                    raise WeightSyncError(f"{entry.name} was sent, which is not planned")
            held = WeightDigest.of(checksums)
            rendezvous.say(f"held {self.reader}", json.dumps(asdict(held)))


@dataclass(frozen=True)
class ShardedTransport(RendezvousTransport):
    """Delivery in which each rank sends its parts, in rounds of weights; see `make_plan`."""

    source_type: ClassVar[type[RendezvousSource]] = ShardedSource

    @property
    def round_bytes(self) -> int:
        """Limit of a round. A receiver holds three times as much: weights, two buckets of parts."""
        return self.bucket_bytes * 2 // 3

    def plan(self, shards: Iterator[WeightShard]) -> "SendPlan":
        """Return the plan for all transfers of these ranks; raises as `make_plan`. Collective."""
        mine: list[list[Any]] = []
        for shard in shards:
            if shard.is_owner:
                mine.append([self.dtype_of(shard).itemsize, *astuple(shard.place)])
        owned: list[list[WeightPlace]] = []
        num_bytes: dict[str, int] = {}
        for text in gather_texts(json.dumps(mine)):
            owned.append([])
            for size, *values in json.loads(text or "[]"):
                owned[-1].append(place := WeightPlace.of(*values))
                num_bytes[place.name] = size * math.prod(place.whole)
        return make_plan(owned, num_bytes, self.round_bytes)

    def send_parts(self, shards: Iterator[WeightShard], plan: "SendPlan") -> WeightDigest:
        """Send this rank's shards; return what every receiver assembled. Collective.

        Raises:
            ReceiverGoneError: a receiver gave up.
            DeadlineError: a receiver did not come, or stopped reading.
            WeightSyncError: ranks hold unequal copies, or receivers unequal weights.
        """
        stream, problem = _CastShards(shards, self), None
        rendezvous = self.sources[0].join(ReceiverGoneError)
        try:
            with rendezvous, in_step(stream):
                if rank() == 0:
                    rendezvous.say(PLAN, plan.to_json())
                if rank() in plan.senders:
                    with sending(rendezvous, self.round_bytes, plan.turns) as packer:
                        stream.pack(plan, packer)
        except (ReceiverGoneError, DeadlineError) as error:
            problem = error
        _compare_ranks(problem, stream.checksums)
        texts = rendezvous.await_readers("held", "say what it holds")
        held = [WeightDigest(**json.loads(text)) for text in texts]
        for reader, each in enumerate(held):
            if each != held[0]:
                raise WeightSyncError(f"rollout engine 0 holds {held[0]}, {reader} holds {each}")
        return held[0]

    def dtype_of(self, shard: WeightShard) -> torch.dtype:
        """Return the dtype in which receivers hold a shard."""
        served: torch.dtype = getattr(torch, self.dtype)
        return received_dtype(shard.place.name, shard.values.dtype, served, self.float32_names)


class _CastShards(Iterator[WeightShard]):
    """Casts this rank's shards to the receiver's dtype and keeps the checksum of each."""

    def __init__(self, shards: Iterator[WeightShard], transport: ShardedTransport) -> None:
        self._shards, self._transport = shards, transport
        self.checksums: dict[str, str] = {}

    def __next__(self) -> WeightShard:
        shard = next(self._shards)
        values = shard.values.detach().to(self._transport.dtype_of(shard))
        method = self._transport.sources[0].checksum_method
        self.checksums[_key(shard.place)] = tensor_checksum(values, method)
        return replace(shard, values=values)

    def pack(self, plan: "SendPlan", packer: Packer) -> None:
        """Pack the shards that this rank sends, round by round; only read its other shards."""
        for each in plan.rounds:
            for place in each.parts[rank()]:
                shard = next((shard for shard in self if shard.is_owner), None)
                if shard is None or shard.place != place:
                    found = shard and shard.place
                    raise WeightSyncError(f"rank {rank()} planned to send {place}, has {found}")
                packer.add(place.name, shard.values, self.checksums[_key(place)])
            packer.flush()
        # Before readers are awaited: other ranks may read their shards together with this one.
        for _ in self:
            pass


def _assemble(
    each: "Round", arriving: Iterator[tuple[Entry, Tensor]], method: ChecksumMethod
) -> dict[str, Tensor]:
    """Return the whole weights of a round, from parts that are valid until the sender's next.

    Raises:
        WeightSyncError: a part is absent, or has an unexpected name, shape or checksum.
    """
    weights: dict[str, Tensor] = {}
    for sender, places in enumerate(each.parts):
        for place in places:
            entry, part = next(arriving, (None, None))
            if entry is None or part is None:
                raise WeightSyncError(f"{_key(place)}: rank {sender} did not send it")
            if (entry.name, tuple(entry.shape)) != (place.name, place.shape):
                raise WeightSyncError(
                    f"{_key(place)}: rank {sender} sent {entry.name} of shape {entry.shape}"
                )
            if tensor_checksum(part, method) != entry.checksum:
                raise WeightSyncError(f"{_key(place)}: what rank {sender} sent is not what arrived")
            if place.name not in weights:
                weights[place.name] = torch.empty(place.whole, dtype=part.dtype, device=part.device)
            weights[place.name][place.slices] = part
    return weights


def _compare_ranks(problem: Exception | None, checksums: Mapping[str, str]) -> None:
    """Raise if a rank could not send, or ranks hold unequal copies of a part. Collective."""
    mine = json.dumps([str(problem) if problem else None, dict(checksums)])
    reports = [json.loads(text or "null") for text in gather_texts(mine)]
    if problem is not None:
        raise problem
    seen: dict[str, tuple[int, str]] = {}
    for number, (said, found) in enumerate(reports):
        if said is not None:
            raise ReceiverGoneError(f"rank {number}: {said}")
        for key, checksum in found.items():
            first, expected = seen.setdefault(key, (number, checksum))
            if checksum != expected:
                raise WeightSyncError(f"{key}: ranks {first} and {number} hold unequal copies")


def _key(place: WeightPlace) -> str:
    return f"{place.name} at {list(place.offsets)} of {list(place.whole)}"


@dataclass(frozen=True)
class Round:
    """Weights that are sent together; `parts` lists for each rank what it sends, in its order."""

    parts: tuple[tuple[WeightPlace, ...], ...]

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each whole weight by name."""
        return {place.name: place.whole for places in self.parts for place in places}


@dataclass(frozen=True)
class SendPlan:
    """Rounds of a transfer, in order."""

    rounds: tuple[Round, ...]

    @property
    def senders(self) -> list[int]:
        """Ranks that send anything, sorted."""
        return sorted({r for each in self.rounds for r, own in enumerate(each.parts) if own})

    @property
    def turns(self) -> Turns:
        """Senders in the order in which receivers put the parts together."""
        return [
            (sender, len(own))
            for each in self.rounds
            for sender, own in enumerate(each.parts)
            if own
        ]

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        return json.dumps(
            [[[astuple(place) for place in own] for own in each.parts] for each in self.rounds]
        )

    @classmethod
    def from_json(cls, text: str) -> "SendPlan":
        """Read the text of `to_json`."""
        return cls(
            tuple(
                Round(tuple(tuple(WeightPlace.of(*values) for values in own) for own in parts))
                for parts in json.loads(text)
            )
        )


def make_plan(
    owned: Sequence[Sequence[WeightPlace]], num_bytes: Mapping[str, int], round_bytes: int
) -> SendPlan:
    """Divide the parts of all ranks into rounds of at most `round_bytes`, or one larger weight.

    Args:
        owned: for each rank, the parts that it sends, in the order in which it reads them.
        num_bytes: size of each whole weight in the receiver's dtype.

    Raises:
        WeightSyncError: parts do not cover a weight, or ranks' reading orders contradict.
    """
    num_held = Counter[tuple[str, tuple[int, ...]]]()
    for place in chain(*owned):
        num_held[place.name, place.whole] += place.num_values
    for (name, whole), held in num_held.items():
        if held != math.prod(whole):
            raise WeightSyncError(f"{name}: the ranks hold {held} of its {math.prod(whole)} values")
    groups = _inseparable([[place.name for place in places] for places in owned])
    orders = [list(dict.fromkeys(groups[place.name] for place in places)) for places in owned]
    group_bytes = Counter[str]()
    for name, group in groups.items():
        group_bytes[group] += num_bytes[name]
    number_of: dict[str, int] = {}
    number, filled = 0, 0
    for group in _merged(orders):
        if filled and filled + group_bytes[group] > round_bytes:
            number, filled = number + 1, 0
        number_of[group] = number
        filled += group_bytes[group]
    parts = [[[] for _ in owned] for _ in range(number + 1 if number_of else 0)]
    for sender, places in enumerate(owned):
        for place in places:
            parts[number_of[groups[place.name]]][sender].append(place)
    return SendPlan(tuple(Round(tuple(tuple(own) for own in each)) for each in parts))


def _inseparable(orders: Sequence[Sequence[str]]) -> dict[str, str]:
    """Map each name to the first of the names that have to share its round.

    Weights that a rank reads between two parts of one weight (as in a fused attention projection,
    head by head) belong to the round of that weight.
    """
    group = {name: name for order in orders for name in order}
    changed = True
    while changed:
        changed = False
        for order in orders:
            last = {group[name]: position for position, name in enumerate(order)}
            head, end = "", -1
            for position, name in enumerate(order):
                if position > end:
                    head, end = group[name], last[group[name]]
                elif group[name] != head:
                    end = max(end, last[group[name]])
                    absorbed = group[name]
                    group = {n: head if g == absorbed else g for n, g in group.items()}
                    changed = True
    return group


def _merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """Return one order that agrees with every given order, preferring the lowest rank."""
    position = [{name: number for number, name in enumerate(order)} for order in orders]
    at, merged = [0] * len(orders), []
    while True:
        heads = [
            order[number] for order, number in zip(orders, at, strict=True) if number < len(order)
        ]
        if not heads:
            return merged
        for name in dict.fromkeys(heads):
            if all(
                places.get(name, here) == here for places, here in zip(position, at, strict=True)
            ):
                break
        else:
            raise WeightSyncError(
                f"ranks read weights in orders that contradict each other: {', '.join(heads[:4])}"
            )
        merged.append(name)
        for sender, places in enumerate(position):
            at[sender] += name in places
