"""Resolves a recipe on this machine, and checks what it names, before a run starts.

Promises: these errors are found within seconds and before anything starts: a store that is missing,
not writable or without safe locks, a missing shard, an adapter that matches no layer, a missing
column, a platform that is unavailable or has no engine in the training backend, a plugin that
cannot be imported, and a reward that cannot be called. A recipe with only built-in parts and data
needs no child process.
Does not promise: errors that only the whole data or the weights can show.
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
"""Long enough for a reward that loads a library before its first answer."""


def preflight(recipe: Recipe, force: Mapping[str, str] = NOTHING_FORCED) -> Recipe:
    """Return the recipe with its device and the commits of everything from the hub.

    `force` has a token by label of each finished stage that runs again.

    Raises:
        ConfigError: names the field and how to fix it.
        ServiceError: the child process that checks models, data and rewards failed.
        StoreError: the service of the store failed or does not answer.
    """
    make_place(recipe.home, "home", "set RLHF_HOME, or location.home of the recipe")
    if recipe.location.home:  # file caches of this process and its jobs are there
        env.set_for_process(env.RLHF_HOME.name, str(recipe.home))
    check_store(recipe.store_uri)
    check_tracking_database(recipe.location.tracking_uri or tracking_address(recipe.home))
    recipe = with_registered_models(recipe, open_storage(recipe.store_uri))
    hardware = resolve_hardware(recipe.hardware, recipe.home)
    if hardware != recipe.hardware:  # a complete setting may be for another machine
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
    judges = {"model": found.reward_model, "judge": found.judge}
    reward = recipe.rl.reward.model_copy(update=judges)
    rl = recipe.rl.model_copy(update={"reward": reward, "distillation": found.teacher})
    sections = {name: getattr(found, name) for name in ("model", "against", "data", "suites")}
    return recipe.model_copy(update={**sections, "rl": rl})


def _check_engine(recipe: Recipe) -> None:
    platform = TABLES["platform"].find(recipe.hardware.platform)
    device = env.RLHF_ENGINE_DEVICE.get()
    if device is None and platform.is_ours:  # an outside platform's device name is not known here
        device = (*platform.also_called, platform.name)[0]
    ENGINES.place(
        recipe.training.backend,
        device=device,
        vendor=env.RLHF_ENGINE_VENDOR.get() or platform.name,
    )


def _check_parts(recipe: Recipe) -> None:
    """Check that the targets of plugins exist, before earlier stages run."""
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
