"""Memory and time of a recipe's stages on a machine: the import surface of the cost model.

Promises: imports no torch and asks no device. A larger micro-batch never needs less memory to
train, and sharding over more ranks never more.
Does not promise: judges and served teachers on devices of their own; rewards in Python; memory of
libraries beyond `PROCESS_BYTES`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engines.config.plugins import is_embedded
from engines.config.stages.base import StageConfig
from engines.cost.engine_bytes import engine_bytes
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
"""Part of a device for fragments, and for tensors that live within one layer or the head."""

Place = Literal["rank", "engine"]


@dataclass(frozen=True)
class PhaseCost:
    """One phase on a rank's device (with a colocated engine), or on one of an engine alone.

    `room_bytes` is what processes and the free share leave. `seconds` are of one step; None if only
    data tells.
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
    """Stages that cost the same on a machine, and the devices that one occupies.

    Attributes:
        state_bytes: weights, gradients and moments of the largest trained model on a rank.
        notes: what is assumed.
        problem: why it cannot run for another reason than device memory; empty if it can.
    """

    labels: tuple[str, ...]
    phases: tuple[PhaseCost, ...]
    num_devices: int
    state_bytes: int
    notes: tuple[str, ...]
    problem: str = ""

    @property
    def fits(self) -> bool:
        """True if every phase has room and the machine has the devices."""
        return not self.problem and not self.missing_bytes

    @property
    def missing_bytes(self) -> int:
        """What the phases need beyond their room, together."""
        return sum(max(0, each.bytes.total_bytes - each.room_bytes) for each in self.phases)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, phase after phase; None if one is unknown."""
        known = [each.seconds for each in self.phases if each.seconds is not None]
        return sum(known) if len(known) == len(self.phases) else None


def stage_costs(
    stages: Iterable[StageConfig], prompt_tokens: int, shape_of: ShapeOf, machine: Machine
) -> tuple[StageCost, ...]:
    """Return the costs of the stages that use devices; equal ones are one entry.

    `prompt_tokens` is the limit of a prompt (`data.max_prompt_length`). Raises as `shape_of` does.
    """
    works = {each.label: workload_of(each, prompt_tokens, shape_of) for each in stages}
    alike = [[label for label, same in works.items() if same == work] for work in works.values()]
    return tuple(
        work_cost(work, labels, machine)
        for (label, work), labels in zip(works.items(), alike, strict=True)
        if work is not None and label == labels[0]
    )


def work_cost(work: Workload, labels: Iterable[str], machine: Machine) -> StageCost:
    """Return the cost of one workload; `labels` are its stages."""
    sampled, num_devices = work.sampled, work.training.num_workers if work.roles else 0
    shares = bool(work.roles) and (sampled is None or sampled.rollout.placement == "colocated")
    is_apart = shares and sampled is not None and not is_embedded(sampled.rollout)
    room = int(machine.memory_bytes * (1 - FREE_SHARE)) - (1 + is_apart) * PROCESS_BYTES
    phases: list[tuple[Phase, PhaseBytes, float | None]] = []
    if work.roles:
        phases.append(("train", train_bytes(work), train_seconds(work, machine)))
    if sampled is not None:
        resting = resting_bytes(work) if shares else PhaseBytes()
        free = room - resting.total_bytes
        engine = engine_bytes(sampled, num_devices * shares, machine.memory_bytes, free)
        num_devices += 0 if shares else engine.num_engines * engine.num_devices
        if work.roles:
            sending = replace(sync_bytes(work), engine_bytes=engine.weights * shares)
            phases.append(("sync", sending, sync_seconds(sampled, engine, machine)))
        held = replace(resting, engine_bytes=engine.weights, cache_bytes=engine.cache)
        phases.append(("sample", held, sample_seconds(sampled, engine, machine)))
    return StageCost(
        labels=tuple(labels),
        phases=tuple(
            PhaseCost(name, "rank" if shares or name != "sample" else "engine", held, room, seconds)
            for name, held, seconds in phases
        ),
        num_devices=num_devices,
        state_bytes=state_bytes(work),
        notes=work.notes,
        problem=_problem(work, num_devices, machine),
    )


def _problem(work: Workload, num_devices: int, machine: Machine) -> str:
    in_host = host_bytes(work, machine.num_per_node)
    shared = work.training.shared_tokens_per_micro_batch
    problems = {
        f"needs {num_devices} devices; {machine.name} has {machine.num_devices}": (
            num_devices > machine.num_devices
        ),
        f"offloads {in_host / 1e9:.0f} GB to a node's memory, which has "
        f"{machine.host_memory_bytes / 1e9:.0f} GB": in_host > machine.host_memory_bytes,
        f"a unit of {work.unit_tokens} tokens exceeds the micro-batch's {shared}": (
            work.unit_tokens > shared
        ),
    }
    return next((text for text, is_so in problems.items() if is_so), "")
