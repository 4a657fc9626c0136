"""Counts what one rank holds on its device, by phase, and what the system says at the same time.

`MemoryAudit` counts parameters, gradients and moments by a walk over the engines, saved tensors by
autograd's hooks, and buckets by module hooks and, on a CPU, by looking at the collectives.
Promises: engines compute the same numbers with and without it. A storage counts in one field.
Gradients that a collective reduced count as buckets until the first micro-batch of a step ends.
Does not count: tensors between two operations, fsdp's gradients of gathered weights, buffers of
transports other than collectives and, on an accelerator, of collectives inside a backend. Layers
of `use_torch_compile` run uncompiled under it on a CPU.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.cost.phase_bytes import Phase, PhaseBytes
from engines.training.engine_backend import EngineBackend
from engines.training.step.saved_tensors import SavedTensors, storage_of
from hardware.base import PlatformBase

_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")


@dataclass(frozen=True)
class PhaseAudit:
    """One phase, over all of its calls.

    Attributes:
        largest: the largest value of each field; they need not be of one moment.
        counted_bytes: the largest sum of the fields at one moment.
        system_bytes: memory of the device's tensors at that moment; on a CPU, resident memory.
        free_bytes: device memory that could still be allocated at that moment; None on a CPU.
    """

    largest: PhaseBytes = PhaseBytes()
    counted_bytes: int = 0
    system_bytes: int = 0
    free_bytes: int | None = None

    def metrics(self, phase: Phase) -> dict[str, float]:
        """Return the values that are not 0 as `memory/<phase>_<name>`."""
        values = asdict(self)
        values |= values.pop("largest")
        return {f"memory/{phase}_{name}": float(value) for name, value in values.items() if value}


class MemoryAudit:
    """Counts in the scope of `phase`; `phases` is what was found since the last `take_metrics`.

    `sampler` returns `held_bytes` of a rollout engine inside the process.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable[EngineBackend]],
        platform: PlatformBase,
        sampler: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._engines, self._platform, self._sampler = engines, platform, sampler
        self._device = platform.device()
        self._saved = SavedTensors(self._is_weight, self._compare)
        self._walked = PhaseBytes()
        self._own = weakref.WeakSet[UntypedStorage]()
        self._gathered = weakref.WeakSet[UntypedStorage]()
        self._entered: list[nn.Module] = []
        self._sent = weakref.WeakSet[UntypedStorage]()
        self._bucket_bytes = 0
        self._roots: set[nn.Module] = set()
        self._phase: Phase | None = None
        self.phases: dict[Phase, PhaseAudit] = {}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Scope of calls of engines; a scope inside another adds to the outer one."""
        if self._phase is not None:
            yield
            return
        self._phase = phase
        try:
            with self._hooks() if phase != "sample" else nullcontext():
                self._walk()
                yield
            self._walk()
        finally:
            self._phase = None

    def held(self) -> PhaseBytes:
        """Count what is held now; outside of phases the audit knows no new tensors."""
        self._walk()
        return self._sum()

    def take_metrics(self) -> dict[str, float]:
        """Return `PhaseAudit.metrics` of all phases since the last call."""
        phases, self.phases = self.phases, {}
        metrics = (audit.metrics(phase) for phase, audit in phases.items())
        return {name: value for found in metrics for name, value in found.items()}

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._on_module).remove)
            hooks.callback(register_module_forward_hook(lambda *_: self._observe()).remove)
            hooks.callback(register_optimizer_step_pre_hook(lambda *_: self._walk()).remove)
            hooks.enter_context(self._saved.counted())
            if self._device.type == "cpu":
                hooks.enter_context(_Collectives(self._on_collective))
            yield

    def _on_module(self, module: nn.Module, inputs: object) -> None:
        if module in self._roots:
            self._walk()  # between two passes, so no weight is gathered
        if next(module.parameters(recurse=False), None) is not None:
            self._entered.append(module)
            self._observe()

    def _find_gathered(self, modules: Iterable[nn.Module]) -> None:
        """Find weights of modules that are not the engine's own, and gradients of those."""
        weights = [weight for module in modules for weight in module.parameters(recurse=False)]
        gathered = [weight for weight in weights if storage_of(weight) not in self._own]
        gradients = [weight.grad for weight in gathered if weight.grad is not None]
        self._gathered.update(map(storage_of, [*gathered, *gradients]))

    def _on_collective(self, tensors: Iterable[Tensor]) -> None:
        self._sent.update(map(storage_of, tensors))
        self._observe()

    def _is_weight(self, storage: UntypedStorage) -> bool:
        is_here = storage.device.type == self._device.type
        self._find_gathered(self._entered[-1:])  # FSDP may have gathered since it was entered
        return not is_here or storage in self._own or storage in self._gathered

    def _walk(self) -> None:
        self._roots.clear()
        self._entered.clear()
        held: tuple[set[UntypedStorage], ...] = set(), set(), set()
        for engine in self._engines():
            tensors = engine.held_tensors()
            self._roots.update(tensors.modules)
            found = (tensors.parameters, tensors.gradients, tensors.moments)
            for storages, each in zip(held, found, strict=True):
                storages.update(map(storage_of, each))
        self._own.clear()
        for storages in held:
            storages.difference_update(self._own)
            self._own.update(storages)
        self._gathered -= self._own
        weights, cache = self._sampler()
        self._walked = PhaseBytes(
            *map(self._size_of, held), engine_bytes=weights, cache_bytes=cache
        )  # fmt: skip
        self._observe()

    def _size_of(self, storages: Iterable[UntypedStorage]) -> int:
        return sum(each.nbytes() for each in storages if each.device.type == self._device.type)

    def _sum(self) -> PhaseBytes:
        return replace(
            self._walked, saved_bytes=self._saved.num_bytes, bucket_bytes=self._bucket_bytes
        )

    def _observe(self) -> None:
        self._find_gathered(self._entered)
        buckets = {*self._gathered, *self._sent}.difference(self._own)
        self._bucket_bytes = self._size_of(each for each in buckets if each not in self._saved)
        self._compare()

    def _compare(self) -> None:
        if self._phase is None:
            return
        now, before = self._sum(), self.phases.get(self._phase, PhaseAudit())
        largest = PhaseBytes(*map(max, astuple(now), astuple(before.largest)))
        counted, system, free = before.counted_bytes, before.system_bytes, before.free_bytes
        if now.total_bytes > counted:
            counted, system = now.total_bytes, self._platform.memory_allocated_bytes()
            free = self._platform.free_memory_bytes()
        self.phases[self._phase] = PhaseAudit(largest, counted, system, free)


class _Collectives(TorchDispatchMode):
    """Hands on the tensors of each collective, before and after it."""

    def __init__(self, on_collective: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._on_collective = on_collective

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace not in _COLLECTIVES:
            return func(*args, **(kwargs or {}))
        self._on_collective(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        found = func(*args, **(kwargs or {}))
        self._on_collective(t for t in tree_leaves(found) if isinstance(t, Tensor))
        return found
