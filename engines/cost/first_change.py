"""The first change of a recipe with which it fits a machine.

Tried in this order: a smaller micro-batch (or cache of an engine), recomputation, offload, a
low-rank adapter, another layout on the same devices, more devices. One change alone comes first;
if none is enough, they are added up in this order, and those that turn out unneeded are dropped.
Every suggestion was computed anew with the change in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from engines.config.backends import backends_with
from engines.config.plugins import is_embedded
from engines.config.recipe import Recipe
from engines.config.training import LoraConfig, TrainingConfig
from engines.cost.machines import Machine
from engines.cost.stage_cost import StageCost
from infra.errors import ConfigError

Settings = Mapping[str, Any]
"""Value by path in a recipe."""
CostsOf = Callable[[Recipe, Machine], Sequence[StageCost]]
"""Returns the stages' costs; raises `ConfigError` for an inconsistent recipe."""
MAX_NUM_DEVICES = 1024
_MIN_TOKENS = 256
_SIZES = (2, 4, 8)
_ENGINE_FRACTIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Change:
    """Settings that make a recipe fit.

    Attributes:
        machine: the machine on which it then fits, with more devices if one was not enough.
        costs: the stages' costs with the change.
    """

    settings: Settings
    machine: Machine
    costs: tuple[StageCost, ...]

    def __str__(self) -> str:
        return " ".join(self.arguments)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The settings as arguments of `--set`."""
        return tuple(text for path, value in self.settings.items() for text in _shown(path, value))


@dataclass(frozen=True)
class _Try:
    """A candidate: its settings over the recipe's, on a machine."""

    settings: Settings
    machine: Machine


def first_change(recipe: Recipe, machine: Machine, costs_of: CostsOf) -> Change | None:
    """Return the first change that fits; None if none of those that are tried does."""
    search = _Search(recipe, costs_of)
    groups = [_micro_batches, _recomputation, _offloads, _adapters, _layouts, _more_devices]
    start = _Try({}, machine)
    for group in groups:
        for tried in group(recipe, start):
            if found := search.fitting(tried):
                return found
    added = start
    for group in groups:
        for tried in group(with_settings(recipe, added.settings), added):
            if found := search.fitting(tried):
                return search.without_unneeded(found)
            if search.excess(tried) < search.excess(added):
                added = tried
    return None


@dataclass(frozen=True)
class _Search:
    recipe: Recipe
    costs_of: CostsOf

    def costs(self, tried: _Try) -> tuple[StageCost, ...] | None:
        """Return the costs of a candidate; None if its settings contradict each other."""
        try:
            return tuple(self.costs_of(with_settings(self.recipe, tried.settings), tried.machine))
        except ConfigError:
            return None

    def fitting(self, tried: _Try) -> Change | None:
        costs = self.costs(tried)
        if not costs or not all(each.fits for each in costs):
            return None
        return Change(tried.settings, tried.machine, costs)

    def excess(self, tried: _Try) -> tuple[float, int]:
        """Return the number of stages that cannot run at all, and the missing bytes."""
        costs = self.costs(tried)
        if costs is None:
            return float("inf"), 0
        missing = [
            max(0, phase.bytes.total_bytes - phase.room_bytes)
            for each in costs
            for phase in each.phases
        ]
        return float(sum(bool(each.problem) for each in costs)), sum(missing)

    def without_unneeded(self, found: Change) -> Change:
        """Drop the settings without which it fits too, the last ones first."""
        for name in reversed([*found.settings]):
            left = {path: value for path, value in found.settings.items() if path != name}
            found = self.fitting(_Try(left, found.machine)) or found
        return found


def with_settings(recipe: Recipe, settings: Settings) -> Recipe:
    """Return a copy with other values.

    Raises:
        ConfigError: the layout contradicts itself.
    """
    for path, value in settings.items():
        recipe = _replaced(recipe, path.split("."), value)
    TrainingConfig.validated(recipe.training.model_dump(), "training")
    return recipe


def _replaced(section: Any, names: Sequence[str], value: Any) -> Any:
    name, *rest = names
    if isinstance(section, BaseModel):
        inner = _replaced(getattr(section, name), rest, value) if rest else value
        return section.model_copy(update={name: inner})
    return {**section, name: value}


def _added(tried: _Try, settings: Settings) -> _Try:
    return _Try({**tried.settings, **settings}, tried.machine)


def _micro_batches(recipe: Recipe, tried: _Try) -> Iterator[_Try]:
    """Yield smaller micro-batches, and smaller fractions for a colocated engine."""
    num_tokens = recipe.training.max_tokens_per_micro_batch // 2
    while num_tokens >= _MIN_TOKENS:
        yield _added(tried, {"training.max_tokens_per_micro_batch": num_tokens})
        num_tokens //= 2
    rollout = recipe.rollout
    if not is_embedded(rollout) and rollout.placement == "colocated":
        now = rollout.options.get("gpu_memory_utilization", 1.0)
        for fraction in (each for each in _ENGINE_FRACTIONS if each < now):
            yield _added(tried, {"rollout.options.gpu_memory_utilization": fraction})


def _recomputation(recipe: Recipe, tried: _Try) -> Iterator[_Try]:
    if not recipe.training.gradient_checkpointing:
        yield _added(tried, {"training.gradient_checkpointing": True})


def _offloads(recipe: Recipe, tried: _Try) -> Iterator[_Try]:
    """Yield the moments' offload, the weights', and both."""
    names = ("training.optimizer_offload", "training.param_offload")
    left = {name: True for name in names if not getattr(recipe.training, name.partition(".")[2])}
    for name in left:
        yield _added(tried, {name: True})
    if len(left) == len(names):
        yield _added(tried, left)


def _adapters(recipe: Recipe, tried: _Try) -> Iterator[_Try]:
    able = recipe.training.backend in backends_with("lora")
    if able and recipe.training.lora is None:
        yield _added(tried, {"training.lora": LoraConfig()})


def _layouts(recipe: Recipe, tried: _Try) -> Iterator[_Try]:
    """Yield other layouts on the machine's devices."""
    training, num_devices = recipe.training, tried.machine.num_devices
    if training.replicate_size > 1:
        yield _added(tried, {"training.replicate_size": 1})
    if training.num_workers != num_devices:
        yield _added(tried, {"training.num_workers": num_devices})
    yield from _longer_groups(recipe, tried)
    for size in _SIZES:
        num_replicas = num_devices // 2 // size
        if num_replicas and size > recipe.rollout.num_workers_per_replica:
            yield _added(
                tried,
                {
                    "training.num_workers": num_devices // 2,
                    "rollout.engine": "vllm",
                    "rollout.placement": "disaggregated",
                    "rollout.num_replicas": num_replicas,
                    "rollout.options": {"tensor_parallel_size": size},
                },
            )


def _longer_groups(recipe: Recipe, tried: _Try) -> Iterator[_Try]:
    """Yield more ranks for each sequence, with fewer tokens on each."""
    training = recipe.training
    for size in _SIZES:
        if size > training.ulysses_size:
            num_tokens = training.shared_tokens_per_micro_batch // size
            yield _added(
                tried,
                {
                    "training.num_workers": max(training.num_workers, size),
                    "training.ulysses_size": size,
                    "training.max_tokens_per_micro_batch": num_tokens,
                },
            )


def _more_devices(recipe: Recipe, tried: _Try) -> Iterator[_Try]:
    """Yield machines with twice as many devices, and so on; ranks and replicas grow with them."""
    machine, factor = tried.machine, 2
    while machine.num_devices * factor <= MAX_NUM_DEVICES:
        more = {"training.num_workers": recipe.training.num_workers * factor}
        if recipe.rollout.placement == "disaggregated":
            more["rollout.num_replicas"] = recipe.rollout.num_replicas * factor
        bigger = machine.with_devices(machine.num_devices * factor)
        yield _Try({**tried.settings, **more}, bigger)
        # The same ranks may fit a machine with more devices.
        yield _Try(tried.settings, bigger)
        factor *= 2


def _shown(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, LoraConfig):
        value = {"rank": value.rank}
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _shown(f"{path}.{name}", each)
    else:
        yield f"{path}={str(value).lower() if isinstance(value, bool) else value}"
