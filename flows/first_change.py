"""The first change of a recipe with which it fits a machine.

Tried in this order: a smaller micro-batch (or cache of an engine), recomputation, offload, a
low-rank adapter, another layout on the same devices, more devices. One change on the same devices
comes first; if none is enough, they are added up in this order, and those that turn out unneeded
are dropped. A recipe for more devices than there are is first put on those. Every suggestion was
computed anew with the change in place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from engines.config.backends import backends_with
from engines.config.plugins import is_embedded
from engines.config.recipe import Recipe
from engines.config.training import TrainingConfig
from engines.cost.machines import Machine
from engines.cost.stage_cost import StageCost
from flows.recipe.recipe import parse_recipe
from flows.recipe.source import with_overrides
from infra.errors import ConfigError

Settings = Mapping[str, str]
"""YAML value by path in a recipe."""
Candidate = tuple[Settings, Machine]
CostsOf = Callable[[Recipe, Machine], tuple[StageCost, ...]]
MAX_NUM_DEVICES = 1024
_MIN_TOKENS = 256
_TOKENS = "training.max_tokens_per_micro_batch"
_WORKERS, _REPLICAS = "training.num_workers", "rollout.num_replicas"
_FRACTION = "rollout.options.gpu_memory_utilization"
_SIZES = (2, 4, 8)
_FACTORS = tuple(2**power for power in range(1, 31))
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

    def groups(self, before: Change) -> list[list[Candidate]]:
        """Return candidates over the settings of `before`, in the order of the module.

        All but the last group keep the machine.
        """
        recipe, machine = self.with_settings(before.settings), before.machine
        training = recipe.training
        moments, weights = (
            {"training.optimizer_offload": "true"},
            {"training.param_offload": "true"},
        )
        takes_adapter = training.lora is None and training.backend in backends_with("lora")
        kept: tuple[Iterable[Settings], ...] = (
            _micro_batches(recipe),
            [{"training.gradient_checkpointing": "true"}],
            [moments, weights, {**moments, **weights}],
            [{"training.lora.rank": "16"}] if takes_adapter else [],
            _layouts(recipe, machine.num_devices),
        )
        same = ([(settings, machine) for settings in group] for group in kept)
        return [
            [({**before.settings, **more}, on) for more, on in group]
            for group in (*same, _more_devices(recipe, machine))
        ]

    def fitting(self, settings: Settings, machine: Machine) -> Change | None:
        """Return a change if it fits."""
        found = self.changed(settings, machine)
        return found if found and found.excess == (0, 0) else None

    def reduced(self, found: Change) -> Change:
        """Drop the settings without which it fits too, the last ones first."""
        for name in reversed([*found.settings]):
            left = {path: value for path, value in found.settings.items() if path != name}
            found = self.fitting(left, found.machine) or found
        larger = _micro_batches(self.recipe) if _TOKENS in found.settings else ()
        better = (self.fitting({**found.settings, **each}, found.machine) for each in larger)
        return next((each for each in better if each), found)


def first_change(recipe: Recipe, machine: Machine, costs_of: CostsOf) -> Change | None:
    """Return the first change that fits; None if none of those that are tried does."""
    search = _Search(recipe, costs_of)
    added = Change({}, machine, costs_of(recipe, machine))
    if recipe.training.num_workers > machine.num_devices:
        added = search.changed(_on_devices(recipe, machine.num_devices), machine) or added
    groups = search.groups(added)
    for settings, on in chain([(added.settings, machine)], *groups[:-1]):
        if found := search.fitting(settings, on):
            return found
    for index in range(len(groups)):
        for settings, on in search.groups(added)[index]:
            found = search.changed(settings, on) or added
            added = min(added, found, key=lambda each: each.excess)
            if added.excess == (0, 0):
                return search.reduced(added)
    return None


def _on_devices(recipe: Recipe, num_devices: int) -> Settings:
    """Return the settings that put a recipe for more ranks on fewer devices."""
    is_split = recipe.training.ulysses_size > num_devices
    shared = _ulysses(recipe.training, num_devices) if is_split else {}
    return {_WORKERS: str(num_devices), **shared}


def _ulysses(training: TrainingConfig, size: int) -> Settings:
    """Return the settings that split the same micro-batch over another number of ranks."""
    num_tokens = training.shared_tokens_per_micro_batch // size
    return {"training.ulysses_size": str(size), _TOKENS: str(num_tokens)}


def _micro_batches(recipe: Recipe) -> Iterator[Settings]:
    """Yield smaller micro-batches, and smaller fractions for a colocated engine."""
    rollout = recipe.rollout
    sizes = (recipe.training.max_tokens_per_micro_batch // factor for factor in _FACTORS)
    yield from ({_TOKENS: str(size)} for size in sizes if size >= _MIN_TOKENS)
    if not is_embedded(rollout) and rollout.placement == "colocated":
        taken = rollout.options.get("gpu_memory_utilization", 1.0)
        yield from ({_FRACTION: str(each)} for each in _ENGINE_FRACTIONS if each < taken)


def _layouts(recipe: Recipe, num_devices: int) -> Iterator[Settings]:
    """Yield more sharding, more ranks for each sequence, and engines over several devices."""
    training, half = recipe.training, num_devices // 2
    yield {"training.replicate_size": "1"}
    yield {_WORKERS: str(num_devices)}
    for size in (each for each in _SIZES if training.ulysses_size < each <= num_devices):
        yield {**_ulysses(training, size), _WORKERS: str(max(training.num_workers, size))}
    for size in (each for each in _SIZES if each <= half):
        yield {
            _WORKERS: str(half),
            "rollout.engine": "vllm",
            "rollout.placement": "disaggregated",
            _REPLICAS: str(half // size),
            "rollout.options.tensor_parallel_size": str(size),
        }


def _more_devices(recipe: Recipe, machine: Machine) -> Iterator[Candidate]:
    """Yield machines with twice as many devices, and so on; ranks and replicas grow or stay."""
    is_apart = recipe.rollout.placement == "disaggregated"
    for factor in (each for each in _FACTORS if machine.num_devices * each <= MAX_NUM_DEVICES):
        bigger = machine.with_devices(machine.num_devices * factor)
        workers = {_WORKERS: str(recipe.training.num_workers * factor)}
        replicas = {_REPLICAS: str(recipe.rollout.num_replicas * factor)} if is_apart else {}
        yield from (({**workers, **replicas}, bigger), ({}, bigger))
