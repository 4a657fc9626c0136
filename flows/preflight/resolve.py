"""Resolves a recipe on this machine, and checks what it names, before a run starts.

Promises: these errors are found within seconds and before anything starts: a store that is missing,
not writable or without safe locks, a missing shard, an adapter that matches no layer, a missing
column, a platform that is unavailable or has no engine in the training backend, a plugin that
cannot be imported, and a reward that cannot be called. A recipe with only built-in parts and data
needs no child process.
Does not promise: errors that only the whole data or the weights can show.
"""

from collections.abc import Mapping
from functools import partial

from engines.config.backends import ENGINES
from engines.config.plugins import REWARDS, TABLES, PluginKind
from engines.config.preflight_request import PreflightAnswer, PreflightRequest
from engines.config.recipe import Recipe
from engines.config.stages.final import EvaluateStageConfig
from engines.config.training import TrainingConfig
from flows.preflight.machine import (
    ask,
    check_devices,
    check_room,
    check_store,
    check_tracking_database,
    resolve_hardware,
)
from flows.recipe.source import registered_model
from flows.run.registry import find_registered, open_tracker
from flows.stage_order import stages_of
from infra import env
from infra.errors import ArtifactError, ConfigError
from infra.host.records import make_place
from infra.redact import redact
from infra.services.stack import tracking_address
from infra.store.storage import Storage, open_storage
from infra.tracking.tracker import Tracker


def with_registered_models(recipe: Recipe, storage: Storage) -> Recipe:
    """Replace each model that is named by an alias with the directory of its files in the store.

    The fingerprint covers the files' bytes, so moving the alias changes it.

    Raises:
        ConfigError: the alias does not exist, or the store does not have the files.
        ServiceError: the registry does not answer.
    """
    return recipe.with_models(partial(_directory, open_tracker(recipe.location), storage))


def _directory(tracker: Tracker, storage: Storage, setting: str, path: str) -> str:
    asked = registered_model(setting, path)
    if asked is None:
        return path
    found = find_registered(tracker, *asked, "run it again once it answers")
    if found is None:
        raise ConfigError(
            setting,
            f"got {path}, and no version has that alias in {redact(tracker.address)}; need a "
            "registered model; run the recipe that promotes it, or name a directory or a hub id",
        )
    try:
        return str(storage.local_copy(found.artifact))
    except (ArtifactError, ValueError):  # ValueError: a version that no pipeline registered
        raise ConfigError(
            setting,
            f"got {path}, which is version {found.version} ({found.artifact.uri}); need its files "
            f"in {storage.uri}; take the store that has them (location.store), or name a directory",
        ) from None


def request_of(recipe: Recipe) -> PreflightRequest | None:
    """Return what the child process checks; None if the recipe uses nothing from outside."""
    ours = {row.name for row in REWARDS.rows}
    own = {*recipe.rl.reward.functions} <= ours
    reward, teacher = recipe.rl.reward, recipe.rl.distillation
    has_rounds = recipe.rl.num_rounds > 0
    has_critic = has_rounds and recipe.rl.critic is not None
    self_play = recipe.preference.self_play if recipe.preference else None
    samples = has_rounds or (self_play is not None and self_play.source == "best_worst")
    is_made = all(
        each is None for each in (recipe.model.path, recipe.against, teacher, *reward.models)
    )
    all_own = own and all(
        {*suite.reward.functions} <= ours
        for suite in recipe.suites.values()
        if suite.reward is not None
    )
    data = (recipe.data, *recipe.data_suites.values())
    if all_own and is_made and all(each and each.arithmetic for each in data):
        return None
    return PreflightRequest(
        model=recipe.model,
        trains=recipe.trains,
        against=recipe.against,
        data=recipe.data,
        suites=recipe.suites,
        training=recipe.training,
        averages=recipe.keeps_average,
        reward=None if own else recipe.rl.reward,
        scoring=reward,
        scored=("rl", "evaluation") if samples else ("evaluation",),
        reward_model=reward.model,
        # An evaluation runs it on a rank of its own, independent of the training settings.
        reward_training=recipe.training if has_rounds else TrainingConfig(),
        judge=reward.judge,
        teacher=teacher,
        rollout_engine=recipe.rollout.engine,
        self_play=self_play,
        has_critic=has_critic,
        trains_values=has_critic or recipe.reward_model is not None,
        answer_lengths={
            stage.answer_setting: stage.evaluation.answer_length
            for stage in stages_of(recipe)
            if isinstance(stage, EvaluateStageConfig)
        },
        stop_token_ids={
            "rl.sampling.stop_token_ids": recipe.rl.sampling.stop_token_ids,
            "evaluation.stop_token_ids": recipe.evaluation.stop_token_ids or (),
            **{
                f"suites.{name}.evaluation.stop_token_ids": suite.evaluation.stop_token_ids or ()
                for name, suite in recipe.suites.items()
            },
        },
    )


DEADLINE_S = 180.0
"""Long enough for a reward that loads a library before its first answer."""


def preflight(recipe: Recipe, force: Mapping[str, str] = {}) -> Recipe:
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
    _check_parts(recipe)
    request = request_of(recipe)
    if request is None:
        return recipe
    what, command = "the preflight of models, data and rewards", ["engines.jobs.preflight.run"]
    answer = ask(PreflightAnswer, what, DEADLINE_S, command, request.model_dump_json())
    found = answer.found
    if found is None:
        raise ConfigError(answer.path or "recipe", str(answer.problem))
    judges = {"model": found.reward_model, "judge": found.judge}
    reward = recipe.rl.reward.model_copy(update=judges)
    rl = recipe.rl.model_copy(update={"reward": reward, "distillation": found.teacher})
    sections = {name: getattr(found, name) for name in ("model", "against", "data", "suites")}
    recipe = recipe.model_copy(update={**sections, "rl": rl})
    if found.checkpoint_bytes is not None:
        check_room(recipe, found.checkpoint_bytes, force)
    return recipe


def _check_parts(recipe: Recipe) -> None:
    """Check that the engine runs on the device, and that the targets of plugins exist."""
    platform = TABLES["platform"].find(recipe.hardware.platform)
    device = env.RLHF_ENGINE_DEVICE.get()
    if device is None and platform.is_ours:  # an outside platform's device name is not known here
        device = (*platform.also_called, platform.name)[0]
    ENGINES.place(
        recipe.training.backend,
        device=device,
        vendor=env.RLHF_ENGINE_VENDOR.get() or platform.name,
    )

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
