"""Settles a recipe on this machine, and checks what it names, before a run starts.

Promises: a store that is not there, does not let us, or would let two own one stage, a missing
shard, an adapter that matches nothing, an absent column, a platform that is not here or that the
training backend has no engine for, a part of others that is not where it was said to be, and a
reward that cannot be called are found before anything is started, in seconds. A recipe that names
nothing of the user's costs no process.
Does not promise: what only the whole data or the weights can tell.
"""

from collections.abc import Mapping

from engines.config.backends import ENGINES
from engines.config.plugins import TABLES, PluginKind
from engines.config.preflight_request import PreflightAnswer, PreflightRequest
from engines.config.recipe import Recipe
from flows.preflight.child import ask
from flows.preflight.platform import check_devices, resolve_hardware
from flows.preflight.registered_models import with_registered_models
from flows.preflight.request import request_of
from flows.preflight.storage import (
    NOTHING_FORCED,
    check_room,
    check_store,
    check_tracking_database,
)
from infra import env
from infra.errors import ConfigError
from infra.host.records import make_place
from infra.services.stack import tracking_address
from infra.store.storage import open_storage

DEADLINE_S = 180.0
"""A reward may load a library of its own before its first answer."""


def preflight(recipe: Recipe, force: Mapping[str, str] = NOTHING_FORCED) -> Recipe:
    """Refuse a recipe whose files, platform or reward would end the run later.

    Args:
        recipe: its fields agree with each other.
        force: by label of a stage that runs although it is done, its token.

    Returns:
        The recipe that runs: on a known device, and what it names on the hub has its commit.

    Raises:
        ConfigError: names the field and what to do.
        ServiceError: the child process that looks at models, data and rewards failed.
        StoreError: the service of the store does not answer, or failed.
    """
    make_place(recipe.home, "home", "set RLHF_HOME, or location.home of the recipe")
    if recipe.location.home:  # where this process and its jobs keep what they know of files
        env.set_for_process(env.RLHF_HOME.name, str(recipe.home))
    check_store(recipe.store_uri)
    check_tracking_database(recipe.location.tracking_uri or tracking_address(recipe.home))
    recipe = with_registered_models(recipe, open_storage(recipe.store_uri))
    hardware = resolve_hardware(recipe.hardware, recipe.home)
    if hardware != recipe.hardware:  # else it was stated in full, perhaps for another machine
        check_devices(recipe.training.num_workers, hardware, recipe.home)
    recipe = recipe.model_copy(update={"hardware": hardware})
    _check_engine(recipe)
    _check_parts(recipe)
    request = request_of(recipe)
    if request is None:
        return recipe
    what, command = "the preflight of models, data and rewards", ["engines.jobs.preflight.run"]
    answer = ask(PreflightAnswer, what, DEADLINE_S, command, request.model_dump_json())
    found = answer.found
    if found is None:
        raise ConfigError(answer.path or "recipe", str(answer.problem))
    recipe = _with_commits(recipe, found)
    if found.checkpoint_bytes is not None:
        check_room(recipe, found.checkpoint_bytes, force)
    return recipe


def _with_commits(recipe: Recipe, found: PreflightRequest) -> Recipe:
    """The recipe with the commit of everything on the hub."""
    judges = {"model": found.reward_model, "judge": found.judge}
    reward = recipe.rl.reward.model_copy(update=judges)
    rl = recipe.rl.model_copy(update={"reward": reward, "distillation": found.teacher})
    sections = {name: getattr(found, name) for name in ("model", "against", "data", "suites")}
    return recipe.model_copy(update={**sections, "rl": rl})


def _check_engine(recipe: Recipe) -> None:
    """A device that the training backend has no engine for is refused before anything starts."""
    platform = TABLES["platform"].find(recipe.hardware.platform)
    device = env.RLHF_ENGINE_DEVICE.get()
    if device is None and platform.is_ours:  # of another's only the platform itself knows
        device = (*platform.also_called, platform.name)[0]
    ENGINES.place(
        recipe.training.backend,
        device=device,
        vendor=env.RLHF_ENGINE_VENDOR.get() or platform.name,
    )


def _check_parts(recipe: Recipe) -> None:
    """A part of others that is not there is refused before the stages in front of it run."""
    algorithm = recipe.rl.algorithm
    named: tuple[tuple[PluginKind, str], ...] = (
        ("backend", recipe.training.backend),
        ("rollout", recipe.rollout.engine),
        ("adv_estimator", algorithm.adv_estimator),
        ("loss_mode", algorithm.loss_mode),
        ("kl_loss_type", algorithm.kl_loss_type.removesuffix("+")),
        ("kl_loss_type", algorithm.kl_penalty),
    )
    for kind, name in named:
        TABLES[kind].check_targets(name)
