"""Weights from a sharded trainer to rollout engines on any machine: each rank broadcasts its parts.

No rank gathers a whole weight; a receiver reads from all ranks, round by round (`send_plan`).
Promises: those of `collective`; checksums of parts are verified on arrival; copies of a part on
several ranks are equal; a round and its parts in flight take at most two buckets on a receiver.
Does not promise that a part was put in its place: the probe after a sync checks that.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.collectives import gather_texts, rank, world_size
from engines.errors import WeightSyncError
from engines.weight_places import WeightPlace, WeightShard
from engines.weight_sync.base import Receipt, ReceiverGoneError
from engines.weight_sync.buckets import Entry, Packer
from engines.weight_sync.lane import come, read_lane, send_lane
from engines.weight_sync.meeting import (
    GRACE_S,
    SENT,
    TRAINER,
    Meeting,
    MeetingSource,
    MeetingTransport,
    attend,
)
from engines.weight_sync.outgoing import in_step, received_dtype
from engines.weight_sync.send_plan import Round, SendPlan, make_plan
from infra.errors import DeadlineError

PLAN = "plan"


@dataclass(frozen=True)
class ShardedSource(MeetingSource):
    """Source that reads the parts of all ranks."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""
        meeting, address = attend(self.host, self.port, self.token, WeightSyncError)
        with meeting.telling(f"rollout engine {self.reader}", "took weights"), ExitStack() as open_:
            text = meeting.wait(PLAN, "the trainer's plan of parts", self.timeout_s + GRACE_S)
            plan = SendPlan.from_json(text)
            lanes = {
                sender: open_.enter_context(closing(_Lane(self, meeting, address, sender)))
                for sender in plan.senders
            }
            # Come to all lanes first: a sender starts only when all of its readers are there.
            for sender in plan.senders:
                come(self, meeting.lane(sender))
            for lane in lanes.values():
                lane.begin()
            assembly = _Assembly(lanes)
            for each in plan.rounds:
                yield from assembly.put_together(each)
            for lane in lanes.values():
                lane.end()
            meeting.say(f"held {self.reader}", json.dumps(asdict(assembly.receipt)))


@dataclass(frozen=True)
class ShardedTransport(MeetingTransport):
    """Delivery in which each rank sends its parts; a weight above `round_bytes` gets a round."""

    source_type: ClassVar[type[MeetingSource]] = ShardedSource

    @property
    def round_bytes(self) -> int:
        """Limit of a round; its parts take as much again twice: those read, those in flight."""
        return self.bucket_bytes * 2 // 3

    def plan(self, shards: Iterator[WeightShard]) -> SendPlan:
        """Return the plan for all transfers of these ranks; raises as `make_plan`. Collective."""
        mine: list[list[Any]] = []
        for shard in shards:
            if shard.is_owner:
                mine.append([self._dtype_of(shard).itemsize, *astuple(shard.place)])
        owned: list[list[WeightPlace]] = []
        num_bytes: dict[str, int] = {}
        for text in gather_texts(json.dumps(mine)):
            owned.append([])
            for size, *values in json.loads(text or "[]"):
                owned[-1].append(place := WeightPlace.of(*values))
                num_bytes[place.name] = size * math.prod(place.whole)
        return make_plan(owned, num_bytes, self.round_bytes)

    def send_parts(self, shards: Iterator[WeightShard], plan: SendPlan) -> Receipt:
        """Send this rank's shards; return what every receiver assembled. Collective.

        Raises:
            ReceiverGoneError: a receiver gave up.
            DeadlineError: a receiver did not come, or stopped reading.
            WeightSyncError: ranks hold unequal copies, or receivers unequal weights.
        """
        source, problem = self.sources[0], None
        outgoing = _Outgoing(shards, self)
        meeting, address = attend(source.host, source.port, source.token, ReceiverGoneError)
        try:
            with meeting.telling(TRAINER, SENT), in_step(outgoing):
                if rank() == 0:
                    meeting.say(PLAN, plan.to_json())
                if rank() in plan.senders:
                    lane, fill = meeting.lane(rank()), partial(outgoing.fill, plan)
                    send_lane(source, lane, address, self.round_bytes, fill)
                for _ in outgoing:  # shards that other ranks send; checksummed only
                    pass
        except (ReceiverGoneError, DeadlineError) as error:
            problem = error
        _compare_ranks(problem, outgoing.checksums)
        return _held_by_all(source, meeting)

    def _dtype_of(self, shard: WeightShard) -> torch.dtype:
        served: torch.dtype = getattr(torch, self.dtype)
        return received_dtype(shard.place.name, shard.values.dtype, served, self.float32_names)


class _Outgoing(Iterator[WeightShard]):
    """Shards of this rank in the receiver's dtype, each with a checksum."""

    def __init__(self, shards: Iterator[WeightShard], transport: ShardedTransport) -> None:
        self._shards, self._transport = shards, transport
        self.checksums: dict[str, str] = {}

    def __next__(self) -> WeightShard:
        shard = next(self._shards)
        values = shard.values.detach().to(self._transport._dtype_of(shard))
        self.checksums[_key(shard.place)] = tensor_checksum(values)
        return replace(shard, values=values)

    def fill(self, plan: SendPlan, packer: Packer) -> None:
        """Pack what this rank sends; a round ends with a flush."""
        for each in plan.rounds:
            for place in each.parts[rank()]:
                shard = next((shard for shard in self if shard.is_owner), None)
                if shard is None or shard.place != place:
                    found = shard and shard.place
                    raise WeightSyncError(f"rank {rank()} planned to send {place}, has {found}")
                packer.add(place.name, shard.values, self.checksums[_key(place)])
            packer.flush()


class _Lane:
    """What one sender has for this reader; a part is valid until the next one."""

    def __init__(self, source: MeetingSource, meeting: Meeting, address: str, sender: int) -> None:
        self._sender = sender
        self._parts = read_lane(source, meeting.lane(sender), address)
        self._first: tuple[Entry, Tensor] | None = None

    def begin(self) -> None:
        self._first = next(self._parts, None)

    def take(self, place: WeightPlace) -> Tensor:
        """Return the next part after checking name, shape and checksum."""
        first, self._first = self._first, None
        found = first or next(self._parts, None)
        if found is None:
            raise WeightSyncError(f"{_key(place)}: rank {self._sender} did not send it")
        entry, tensor = found
        if (entry.name, tuple(entry.shape)) != (place.name, place.shape):
            raise WeightSyncError(
                f"{_key(place)}: rank {self._sender} sent {entry.name} of shape {entry.shape}"
            )
        if tensor_checksum(tensor) != entry.checksum:
            raise WeightSyncError(
                f"{_key(place)}: what rank {self._sender} sent is not what arrived"
            )
        return tensor

    def end(self) -> None:
        """Report that all was taken; raise if there is more."""
        if (more := self._first or next(self._parts, None)) is not None:
            raise WeightSyncError(f"rank {self._sender} sent {more[0].name}, which is not planned")

    def close(self) -> None:
        self._parts.close()


class _Assembly:
    """Assembles weights from parts and records their checksums."""

    def __init__(self, lanes: Mapping[int, _Lane]) -> None:
        self._lanes = lanes
        self._checksums: dict[str, str] = {}
        self._num_bytes = 0

    @property
    def receipt(self) -> Receipt:
        return Receipt(combine(self._checksums.items()), len(self._checksums), self._num_bytes)

    def put_together(self, each: Round) -> Iterator[tuple[str, Tensor]]:
        whole: dict[str, Tensor] = {}
        for sender, places in enumerate(each.parts):
            for place in places:
                part = self._lanes[sender].take(place)
                if place.name not in whole:
                    whole[place.name] = torch.empty(
                        place.whole, dtype=part.dtype, device=part.device
                    )
                whole[place.name][place.slices] = part
        for name in each.weights:
            tensor = whole.pop(name)
            self._checksums[name] = tensor_checksum(tensor)
            self._num_bytes += tensor.nbytes
            yield name, tensor


def _compare_ranks(problem: Exception | None, checksums: Mapping[str, str]) -> None:
    """Raise if a rank could not send, or ranks hold unequal copies of a part. Collective."""
    if world_size() == 1 and problem is not None:
        raise problem
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


def _held_by_all(source: MeetingSource, meeting: Meeting) -> Receipt:
    """Return the receipt that all readers report."""
    held = [
        Receipt(**json.loads(meeting.wait(f"held {reader}", what, source.timeout_s)))
        for reader in range(source.num_readers)
        for what in [f"rollout engine {reader} to say what it holds"]
    ]
    for reader, receipt in enumerate(held):
        if receipt != held[0]:
            raise WeightSyncError(f"rollout engine 0 holds {held[0]}, {reader} holds {receipt}")
    return held[0]


def _key(place: WeightPlace) -> str:
    return f"{place.name} at {list(place.offsets)} of {list(place.whole)}"
