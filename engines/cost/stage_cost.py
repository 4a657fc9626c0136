"""Memory and time of a recipe's stages on a machine: the import surface of the cost model.

Promises: no torch, no file but those given, no device. More tokens in a micro-batch never need
less memory, more ranks never more.
Does not promise: judges and served teachers on devices of their own; rewards in Python; memory of
libraries beyond `PROCESS_BYTES`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engines.config.plugins import is_embedded
from engines.config.stages.base import StageConfig
from engines.cost.engine_bytes import EngineBytes, engine_bytes
from engines.cost.machines import Machine
from engines.cost.phase_bytes import Phase, PhaseBytes
from engines.cost.rank_bytes import (
    host_bytes,
    resting_bytes,
    state_bytes,
    sync_bytes,
    train_bytes,
)
from engines.cost.seconds import sample_seconds, sync_seconds, train_seconds
from engines.cost.workload import ShapeOf, Workload, workload_of

PROCESS_BYTES = 800_000_000
"""Device memory of a process before its first tensor: context, kernels, communicators."""
FREE_SHARE = 0.05
"""Part of a device that is kept free for fragments and for tensors that live within one layer."""

Place = Literal["rank", "engine"]


@dataclass(frozen=True)
class PhaseCost:
    """One phase on one kind of device.

    Attributes:
        place: a training rank's device, with the colocated engine, or one of an engine alone.
        room_bytes: what a device offers after processes and the free share.
        seconds: of one step; None if only data tells.
    """

    phase: Phase
    place: Place
    bytes: PhaseBytes
    room_bytes: int
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        """True if the device has room."""
        return self.bytes.total_bytes <= self.room_bytes


@dataclass(frozen=True)
class StageCost:
    """One stage on a machine.

    Attributes:
        labels: stages that cost the same.
        num_devices: devices that the stage occupies.
        state_bytes: weights, gradients and moments of the largest trained model on a rank.
        host_bytes: offloaded state in the memory of a node.
        notes: what is assumed.
        problem: why it cannot run for another reason than device memory; empty if it can.
    """

    labels: tuple[str, ...]
    phases: tuple[PhaseCost, ...]
    num_devices: int
    state_bytes: int
    host_bytes: int
    notes: tuple[str, ...]
    problem: str = ""

    @property
    def fits(self) -> bool:
        """True if every phase has room and the machine has the devices."""
        return not self.problem and all(each.fits for each in self.phases)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, phase after phase; None if one is unknown."""
        known = [each.seconds for each in self.phases if each.seconds is not None]
        return sum(known) if len(known) == len(self.phases) else None


def stage_costs(
    stages: Iterable[StageConfig], prompt_tokens: int, shape_of: ShapeOf, machine: Machine
) -> tuple[StageCost, ...]:
    """Return the costs of the stages that use devices; equal ones are one entry.

    Args:
        prompt_tokens: limit of a prompt (`data.max_prompt_length`).
        shape_of: returns the shape of the model of a recipe setting.

    Raises:
        ValueError, ConfigError: raised by `shape_of`.
    """
    found: dict[StageCost, list[str]] = {}
    for stage in stages:
        work = workload_of(stage, prompt_tokens, shape_of)
        if work is not None:
            found.setdefault(work_cost(replace(work, label=""), machine), []).append(stage.label)
    return tuple(replace(cost, labels=tuple(labels)) for cost, labels in found.items())


def work_cost(work: Workload, machine: Machine) -> StageCost:
    """Return the cost of one workload."""
    sampled = work.sampled
    num_ranks = work.training.num_workers if work.roles else 0
    embedded = sampled is None or is_embedded(sampled.rollout)
    beside = sampled is not None and not embedded
    shares = bool(num_ranks) and (
        sampled is None or embedded or sampled.rollout.placement == "colocated"
    )
    processes = 2 if beside and shares and num_ranks else 1
    room = _room(machine, processes)
    resting = resting_bytes(work) if shares and work.roles else PhaseBytes()
    engine = None
    if sampled is not None:
        free = room - resting.total_bytes
        engine = engine_bytes(sampled, num_ranks, machine.memory_bytes, free)
    phases: list[PhaseCost] = []
    if work.roles:
        seconds = train_seconds(work, machine)
        phases.append(PhaseCost("train", "rank", train_bytes(work), room, seconds))
    if engine is not None:
        phases += _sampling(work, engine, machine, resting, room, shares=shares)
    num_devices = num_ranks
    if engine is not None and not shares:
        num_devices += engine.num_engines * engine.num_devices
    in_host = host_bytes(work, machine.num_per_node)
    return StageCost(
        labels=(work.label,),
        phases=tuple(phases),
        num_devices=num_devices,
        state_bytes=state_bytes(work),
        host_bytes=in_host,
        notes=work.notes,
        problem=_problem(work, num_devices, in_host, machine),
    )


def _sampling(
    work: Workload,
    engine: EngineBytes,
    machine: Machine,
    resting: PhaseBytes,
    room: int,
    *,
    shares: bool,
) -> list[PhaseCost]:
    sampled = work.sampled
    if sampled is None:
        return []
    phases: list[PhaseCost] = []
    place: Place = "rank" if shares else "engine"
    if work.roles:
        sending, seconds = sync_bytes(work), sync_seconds(sampled, engine, machine)
        if shares:
            sending = replace(sending, engine_bytes=engine.weights)
        phases.append(PhaseCost("sync", "rank", sending, room, seconds))
    held = replace(resting, engine_bytes=engine.weights, cache_bytes=engine.cache)
    seconds = sample_seconds(sampled, engine, machine)
    phases.append(PhaseCost("sample", place, held, room, seconds))
    return phases


def _room(machine: Machine, num_processes: int) -> int:
    return int(machine.memory_bytes * (1 - FREE_SHARE)) - num_processes * PROCESS_BYTES


def _problem(work: Workload, num_devices: int, in_host: int, machine: Machine) -> str:
    training = work.training
    if num_devices > machine.num_devices:
        return f"needs {num_devices} devices; {machine.name} has {machine.num_devices}"
    if in_host > machine.host_memory_bytes:
        return (
            f"offloads {in_host / 1e9:.0f} GB to a node's memory, which has "
            f"{machine.host_memory_bytes / 1e9:.0f} GB"
        )
    shared = training.shared_tokens_per_micro_batch
    if work.roles and work.unit_tokens > shared:
        return f"a unit of {work.unit_tokens} tokens exceeds the micro-batch's {shared}"
    return ""
