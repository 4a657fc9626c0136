"""Plans a recipe for a machine that need not be this one: `rlhf plan RECIPE --on h100x8`.

Promises: no device is probed, no job or store is opened; of models only `config.json` is read.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from engines.config.plugins import is_embedded
from engines.config.recipe import Recipe
from engines.config.rollout import NEEDS_FP8
from engines.config.rules.models import check_quantization
from engines.cost.machines import Machine, machine_like
from engines.cost.model_config import shapes_of
from engines.cost.phase_bytes import PhaseBytes
from engines.cost.stage_cost import StageCost, stage_costs
from flows.first_change import Change, first_change
from flows.stage_order import stages_of
from infra.errors import ConfigError
from infra.plugins import assumed_installed
from infra.survey_report import FoundPlatform

GB = 1e9
MARGIN_SHARE = 0.1
"""Part of a device, beside `FREE_SHARE`, that training has to leave free without recomputation."""


@dataclass(frozen=True)
class MachinePlan:
    """A recipe on a machine.

    Attributes:
        change: first change that fits; None if none is needed or none that was tried fits.
    """

    run_name: str
    machine: Machine
    costs: tuple[StageCost, ...]
    change: Change | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True if every stage fits as the recipe is."""
        return all(each.fits for each in self.costs)


def plan_on(recipe: Recipe, machine: Machine) -> MachinePlan:
    """Return a recipe's costs and the first change that fits; raises as `costs_on`."""
    with assumed_installed():
        costs, choices = costs_on(recipe, machine), resolved_on(recipe, machine)[1]
        fits = all(each.fits for each in costs)
        change = None if fits else first_change(recipe, machine, costs_on)
    notes = dict.fromkeys([*choices, *(note for each in costs for note in each.notes)])
    platform = recipe.hardware.platform
    if platform not in {"auto", machine.platform}:
        notes[f"hardware.platform is {platform}; set it to {machine.platform} there"] = None
    return MachinePlan(recipe.run_name, machine, costs, change, tuple(notes))


def costs_on(recipe: Recipe, machine: Machine) -> tuple[StageCost, ...]:
    """Return the costs of a recipe's stages; raises `ConfigError` as `shapes_of`."""
    recipe, _ = resolved_on(recipe, machine)
    prompt = recipe.data.max_prompt_length if recipe.data else recipe.model.max_length
    return stage_costs(stages_of(recipe), prompt, shapes_of(recipe), machine)


def resolved_on(recipe: Recipe, machine: Machine) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe without `auto` in `training`, and the reasons; raises as `shapes_of`."""
    training, reasons = recipe.training, []
    if training.gradient_checkpointing == "auto":
        recomputes, why = _recomputes(recipe, machine)
        reasons.append(f"training.gradient_checkpointing is {'on' if recomputes else 'off'}: {why}")
        training = training.model_copy(update={"gradient_checkpointing": recomputes})
    if training.use_torch_compile == "auto" and training.compile_hindrance is not None:
        reasons.append(f"training.use_torch_compile is off: {training.compile_hindrance}")
    resolved = training.on(accelerator=True)
    return recipe.model_copy(update={"training": resolved}), tuple(reasons)


def _recomputes(recipe: Recipe, machine: Machine) -> tuple[bool, str]:
    """Return False if training fits without recomputation, with a margin; and the reason."""
    shape = shapes_of(recipe)("model.path", False)
    kept = recipe.training.model_copy(update={"gradient_checkpointing": False})
    costs = costs_on(recipe.model_copy(update={"training": kept}), machine)
    trained = [phase for cost in costs for phase in cost.phases if phase.phase == "train"]
    fullest = max(trained, key=lambda it: it.bytes.total_bytes - it.room_bytes, default=None)
    rl = recipe.rl
    # An engine inside the ranks answers for such a model beside the policy.
    served = rl.reward.judge or (rl.distillation and rl.distillation.served)
    has_other = served is not None and is_embedded(recipe.rollout)
    if fullest is None or shape.vision_parameters or shape.uncounted or has_other:
        return True, "what training keeps without it is not wholly counted"
    needed, room = fullest.bytes.total_bytes, fullest.room_bytes
    room -= int(MARGIN_SHARE * machine.memory_bytes)
    why = f"without it training needs {needed / GB:.1f} GB, and {room / GB:.1f} may be used"
    return needed > room, why


def resolved_here(recipe: Recipe, found: FoundPlatform) -> Recipe:
    """Return `resolved_on` for this machine; layers are recomputed if sizes are unknown."""
    with suppress(ConfigError):
        if found.memory_bytes is not None:
            return resolved_on(recipe, _machine_of(found, found.memory_bytes))[0]
    return recipe.model_copy(update={"training": recipe.training.on(accelerator=True)})


def _machine_of(found: FoundPlatform, memory_bytes: int) -> Machine:
    return machine_like(found.name, found.label, memory_bytes, found.num_devices or 1)


def device_shortage(recipe: Recipe, found: FoundPlatform) -> str:
    """Return why this machine's devices cannot hold a model's training state, and the first change.

    Counts only weights, gradients and moments of one model on a rank, which nothing that happens in
    a run makes smaller. Empty if they fit, or if the model cannot be counted.
    """
    if found.memory_bytes is None:
        return ""
    machine = _machine_of(found, found.memory_bytes)
    try:
        costs = costs_on(recipe, machine)
    except ConfigError:
        return ""
    largest = max(costs, key=lambda each: each.state_bytes, default=None)
    if largest is None or largest.state_bytes <= found.memory_bytes:
        return ""
    remedy, change = "take a smaller model", first_change(recipe, machine, costs_on)
    if change is not None:
        num_devices = change.machine.num_devices
        remedy = f"set {' '.join(change.arguments)}" if change.arguments else "take another machine"
        remedy += f", with {num_devices} devices" if num_devices > machine.num_devices else ""
    return (
        f"{largest.labels[0]} needs {largest.state_bytes / GB:.1f} GB on each rank for weights, "
        f"gradients and moments, {found.label} has {found.memory_bytes / GB:.1f} GB; {remedy}"
    )


def check_quantization_on(recipe: Recipe, found: FoundPlatform) -> None:
    """Refuse 8-bit floats that this machine, or the dtype chosen for it, lacks (`ConfigError`)."""
    training = recipe.training.on(accelerator=found.device != "cpu")
    check_quantization(recipe.rollout, training)
    if not found.supports_fp8:
        raise ConfigError(*NEEDS_FP8)


def as_json(plan: MachinePlan) -> dict[str, Any]:
    """Return a plan as plain values, for `--json`."""
    change = plan.change
    stages = [{**asdict(each), "fits": each.fits, "seconds": each.seconds} for each in plan.costs]
    return {
        "run": plan.run_name,
        "machine": plan.machine.model_dump(),
        "fits": plan.fits,
        "stages": stages,
        "change": change and {"settings": change.arguments, "machine": change.machine.name},
        "notes": plan.notes,
    }


def lines_of(plan: MachinePlan) -> Iterator[str]:
    """Yield a line for each phase of each stage, what is assumed, and the verdict."""
    for cost in plan.costs:
        more = len(cost.labels) - 1
        yield cost.labels[0] + (f" and {more} more alike" if more else "")
        for phase in cost.phases:
            needed, room = phase.bytes.total_bytes / GB, phase.room_bytes / GB
            seconds = "" if phase.seconds is None else f"{phase.seconds:.3g} s"
            verb = "fits" if phase.fits else "TOO MUCH"
            name = phase.phase if phase.place == "rank" else f"{phase.phase}, engine alone"
            yield (
                f"  {name:<20} {needed:7.1f} of {room:.1f} GB  {verb:<8} {seconds:>10}  "
                f"{parts_of(phase.bytes)}"
            )
        if cost.problem:
            yield f"  {cost.problem}"
    yield "GB and seconds are of one device and one step."
    yield from (f"Assumed: {note}." for note in plan.notes)
    yield f"{plan.run_name} on {plan.machine.name}: {verdict(plan)}"


def parts_of(found: PhaseBytes) -> str:
    """Return the parts of a phase that are not 0, in GB."""
    parts = ((name.removesuffix("_bytes"), value) for name, value in asdict(found).items())
    return ", ".join(f"{name} {value / GB:.1f}" for name, value in parts if value)


def verdict(plan: MachinePlan) -> str:
    """Return whether a recipe fits, or the first change with which it does, and its new peak."""
    change = plan.change
    if change is None:
        return "fits" if plan.fits else "does not fit, nor does any change that was tried"
    peak = max(phase.bytes.total_bytes for cost in change.costs for phase in cost.phases)
    words = " ".join((*change.arguments, f"on {change.machine.name}"))
    return f"does not fit; the first change that does: {words} (then at most {peak / GB:.1f} GB)"
