"""The first change of a recipe with which it fits a machine.

Tried in this order: a smaller micro-batch (or cache of an engine), recomputation, offload, a
low-rank adapter, another layout on the same devices, more devices. One change on the same devices
comes first; if none is enough, they are added up in this order, and those that turn out unneeded
are dropped. A recipe for more devices than there are is first put on those. Every suggestion was
computed anew with the change in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engines.config.backends import backends_with
from engines.config.plugins import is_embedded
from engines.config.recipe import Recipe
from engines.cost.machines import Machine
from engines.cost.stage_cost import StageCost
from flows.recipe.recipe import parse_recipe
from flows.recipe.source import with_overrides
from infra.errors import ConfigError

Settings = Mapping[str, str]
"""YAML value by path in a recipe."""
CostsOf = Callable[[Recipe, Machine], tuple[StageCost, ...]]
MAX_NUM_DEVICES = 1024
_MIN_TOKENS = 256
_TOKENS = "training.max_tokens_per_micro_batch"
_WORKERS, _REPLICAS = "training.num_workers", "rollout.num_replicas"
_SIZES = (2, 4, 8)
_ENGINE_FRACTIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Change:
    """A recipe with other settings, on the machine or on one with more devices."""

    settings: Settings
    machine: Machine
    costs: tuple[StageCost, ...]

    @property
    def arguments(self) -> list[str]:
        """The settings as arguments of `--set`."""
        return [f"{path}={value}" for path, value in self.settings.items()]

    @property
    def excess(self) -> tuple[int, int]:
        """The number of stages that cannot run at all, and the missing bytes; (0, 0) if it fits."""
        missing = sum(each.missing_bytes for each in self.costs)
        return sum(bool(each.problem) for each in self.costs), missing


@dataclass(frozen=True)
class _Search:
    """Computes changes of a recipe."""

    recipe: Recipe
    costs_of: CostsOf

    def with_settings(self, settings: Settings) -> Recipe:
        """Return the changed recipe; raises `ConfigError` if its settings contradict each other."""
        data = self.recipe.model_dump(mode="json", exclude_unset=True)
        return parse_recipe(with_overrides(data, [f"{k}={v}" for k, v in settings.items()]))

    def changed(self, settings: Settings, machine: Machine) -> Change | None:
        """Return a change with its costs; None if its settings contradict each other."""
        try:
            recipe = self.with_settings(settings)
        except ConfigError:
            return None
        return Change(settings, machine, self.costs_of(recipe, machine))

    def fitting(self, settings: Settings, machine: Machine) -> Change | None:
        """Return a change if it fits."""
        found = self.changed(settings, machine)
        return found if found and found.excess == (0, 0) else None

    def reduced(self, found: Change) -> Change:
        """Drop the settings without which it fits too, the last ones first."""
        for name in reversed([*found.settings]):
            left = {path: value for path, value in found.settings.items() if path != name}
            found = self.fitting(left, found.machine) or found
        if _TOKENS in found.settings:
            for larger, _ in _micro_batches(self.recipe, found.machine):
                if better := self.fitting({**found.settings, **larger}, found.machine):
                    return better
        return found


def first_change(recipe: Recipe, machine: Machine, costs_of: CostsOf) -> Change | None:
    """Return the first change that fits; None if none of those that are tried does."""
    search = _Search(recipe, costs_of)
    added = Change({}, machine, costs_of(recipe, machine))
    if recipe.training.num_workers > machine.num_devices:
        added = search.changed(_on_devices(recipe, machine.num_devices), machine) or added
    start = added.settings
    for settings, on in ((start, machine), *_candidates(search, start, machine, _GROUPS[:-1])):
        if found := search.fitting(settings, on):
            return found
    for group in _GROUPS:
        for settings, on in _candidates(search, added.settings, machine, [group]):
            found = search.changed(settings, on)
            if found and found.excess == (0, 0):
                return search.reduced(found)
            if found and found.excess < added.excess:
                added = found
    return None


def _on_devices(recipe: Recipe, num_devices: int) -> Settings:
    """Return the settings that put a recipe for more ranks on fewer devices."""
    training = recipe.training
    settings = {_WORKERS: str(num_devices)}
    if training.ulysses_size > num_devices:
        num_tokens = training.shared_tokens_per_micro_batch // num_devices
        settings |= {"training.ulysses_size": str(num_devices), _TOKENS: str(num_tokens)}
    return settings


Candidates = Iterator[tuple[Settings, Machine]]
Group = Callable[[Recipe, Machine], Candidates]


def _candidates(
    search: _Search, before: Settings, machine: Machine, groups: Sequence[Group]
) -> Candidates:
    """Yield the groups' candidates in order, over the settings `before`."""
    recipe = search.with_settings(before)
    for group in groups:
        for settings, on in group(recipe, machine):
            yield {**before, **settings}, on


def _micro_batches(recipe: Recipe, machine: Machine) -> Candidates:
    """Yield smaller micro-batches, and smaller fractions for a colocated engine."""
    num_tokens, rollout = recipe.training.max_tokens_per_micro_batch // 2, recipe.rollout
    while num_tokens >= _MIN_TOKENS:
        yield {_TOKENS: str(num_tokens)}, machine
        num_tokens //= 2
    if not is_embedded(rollout) and rollout.placement == "colocated":
        for fraction in _ENGINE_FRACTIONS:
            if fraction < rollout.options.get("gpu_memory_utilization", 1.0):
                yield {"rollout.options.gpu_memory_utilization": str(fraction)}, machine


def _recomputation(recipe: Recipe, machine: Machine) -> Candidates:
    if not recipe.training.gradient_checkpointing:
        yield {"training.gradient_checkpointing": "true"}, machine


def _offloads(recipe: Recipe, machine: Machine) -> Candidates:  # noqa: ARG001  as its like
    moments, weights = {"training.optimizer_offload": "true"}, {"training.param_offload": "true"}
    for settings in (moments, weights, {**moments, **weights}):
        yield settings, machine


def _adapters(recipe: Recipe, machine: Machine) -> Candidates:
    if recipe.training.lora is None and recipe.training.backend in backends_with("lora"):
        yield {"training.lora.rank": "16"}, machine


def _layouts(recipe: Recipe, machine: Machine) -> Candidates:
    """Yield more sharding, more ranks for each sequence, and engines over several devices."""
    training, num_devices = recipe.training, machine.num_devices
    yield {"training.replicate_size": "1"}, machine
    yield {_WORKERS: str(num_devices)}, machine
    for size in (each for each in _SIZES if training.ulysses_size < each <= num_devices):
        num_tokens = training.shared_tokens_per_micro_batch // size
        settings = {"training.ulysses_size": str(size), _TOKENS: str(num_tokens)}
        yield {**settings, _WORKERS: str(max(training.num_workers, size))}, machine
    for size in (each for each in _SIZES if each <= num_devices // 2):
        yield (
            {
                _WORKERS: str(num_devices // 2),
                "rollout.engine": "vllm",
                "rollout.placement": "disaggregated",
                _REPLICAS: str(num_devices // 2 // size),
                "rollout.options.tensor_parallel_size": str(size),
            },
            machine,
        )


def _more_devices(recipe: Recipe, machine: Machine) -> Candidates:
    """Yield machines with twice as many devices, and so on; ranks and replicas grow or stay."""
    factor = 2
    while machine.num_devices * factor <= MAX_NUM_DEVICES:
        bigger = machine.with_devices(machine.num_devices * factor)
        more = {_WORKERS: str(recipe.training.num_workers * factor)}
        if recipe.rollout.placement == "disaggregated":
            more[_REPLICAS] = str(recipe.rollout.num_replicas * factor)
        yield more, bigger
        yield {}, bigger
        factor *= 2


_GROUPS: Sequence[Group] = (
    _micro_batches, _recomputation, _offloads, _adapters, _layouts, _more_devices,
)  # fmt: skip
