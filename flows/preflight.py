"""The cheap looks before a run: does what the recipe names exist, and does its reward work?

Promises: a store that is not there, does not let us, or would let two own one stage, a missing
shard, an adapter that matches nothing, an absent column, a platform that is not here or that the
training backend has no engine for, a part of others that is not where it was said to be, and a
reward that cannot be called are found before anything is started, in seconds. A recipe that names
nothing of the user's costs no process.
Does not promise: what only the whole data or the weights can tell.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from engines.config.backends import ENGINES
from engines.config.look import Answer, Look
from engines.config.plugins import REWARDS, TABLES, PluginKind
from engines.config.sections import RLConfig, SupervisedConfig
from engines.config.stages.final import EvaluateStageConfig
from engines.config.training import TrainingConfig
from flows.asked_run import plan_run
from flows.child import ask
from flows.platform_probe import check_devices, memory_shortage, resolve_hardware
from flows.recipe.recipe import Recipe
from flows.run.registered_models import with_registered_models
from infra import env
from infra.errors import ConfigError, StoreDeniedError, StoreError
from infra.host.mounts import NETWORK, file_system_of
from infra.host.records import make_place
from infra.services.stack import tracking_address
from infra.store.storage import open_storage

DEADLINE_S = 180.0
"""A reward may load a library of its own before its first answer."""
NUM_CHECKPOINTS = 2
"""The newest stays until the next one is whole."""
TRAINING_STAGES = ("sft", "reward_model", "preference", "rl_round")
"""How the labels of those begin that write step checkpoints."""
NOTHING_FORCED: Mapping[str, str] = {}


def preflight(recipe: Recipe, force: Mapping[str, str] = NOTHING_FORCED) -> Recipe:
    """Refuse a recipe whose files, platform or reward would end the run later.

    Args:
        recipe: its fields agree with each other.
        force: by label of a stage that runs although it is done, its token.

    Returns:
        The recipe that runs: on a known device, and what it names on the hub has its commit.

    Raises:
        ConfigError: names the field and what to do.
        ServiceError: the look itself failed.
        StoreError: the service of the store does not answer, or failed.
    """
    make_place(recipe.home, "home", "set RLHF_HOME, or location.home of the recipe")
    if recipe.location.home:  # where this process and its jobs keep what they know of files
        env.set_for_process(env.RLHF_HOME.name, str(recipe.home))
    _check_store(recipe.store_uri)
    check_tracking_database(recipe.location.tracking_uri or tracking_address(recipe.home))
    recipe = with_registered_models(recipe, open_storage(recipe.store_uri))
    hardware = resolve_hardware(recipe.hardware, recipe.home)
    if hardware != recipe.hardware:  # else it was stated in full, perhaps for another machine
        check_devices(recipe.training.num_workers, hardware, recipe.home)
    recipe = recipe.model_copy(update={"hardware": hardware})
    _check_engine(recipe)
    _check_parts(recipe)
    look = look_of(recipe)
    if look is None:
        return recipe
    what, command = "the look at what the recipe names", ["engines.jobs.preflight.look"]
    answer = ask(Answer, what, DEADLINE_S, command, look.model_dump_json())
    if answer.look is None:
        raise ConfigError(answer.path or "recipe", str(answer.problem))
    judges = {"model": answer.look.reward_model, "judge": answer.look.judge}
    reward = recipe.rl.reward.model_copy(update=judges)
    rl = recipe.rl.model_copy(update={"reward": reward, "distillation": answer.look.teacher})
    found = {
        "model": answer.look.model,
        "against": answer.look.against,
        "data": answer.look.data,
        "suites": answer.look.suites,
        "rl": rl,
    }
    recipe = recipe.model_copy(update=found)
    if answer.look.checkpoint_bytes is not None:
        check_room(recipe, answer.look.checkpoint_bytes, force)
    return recipe


def check_room(
    recipe: Recipe, checkpoint_bytes: int, force: Mapping[str, str] = NOTHING_FORCED
) -> None:
    """Refuse a store without room for its checkpoints, and memory without room for one.

    Args:
        recipe: what it names on the hub has its commit.
        checkpoint_bytes: of one.
        force: by label of a stage that runs although it is done, its token.

    Raises:
        ConfigError: some stage is to train; says how much is needed, and how much there is; or of
            `plan_run`.
    """
    shortage = memory_shortage(checkpoint_bytes, recipe.hardware)
    if shortage and _trains(recipe, force):
        raise ConfigError(
            "model.path",
            f"got {recipe.model.path}: {shortage}; take a smaller model or training.lora, or set "
            "RAY_ADDRESS to a cluster",
        )
    if "://" in recipe.store_uri:  # a bucket does not say
        return
    num_checkpoints = NUM_CHECKPOINTS + _averages(recipe)
    need_bytes = num_checkpoints * checkpoint_bytes
    free_bytes = shutil.disk_usage(recipe.store_uri).free
    if free_bytes < need_bytes and _trains(recipe, force):
        raise ConfigError(
            "location.store",
            f"need {num_checkpoints} x {checkpoint_bytes / 1e9:.1f} GB for checkpoints of "
            f"{recipe.model.path}, {recipe.store_uri} has {free_bytes / 1e9:.1f} GB free; free "
            "some, or name another place",
        )


def _averages(recipe: Recipe) -> bool:
    """Whether a stage commits an average of its weights, of which it writes a last checkpoint."""
    return any(section.optimizer.ema for section in _training_sections(recipe))


def _trains(recipe: Recipe, force: Mapping[str, str]) -> bool:
    """Whether some stage is to write checkpoints."""
    planned = plan_run(recipe, force).stages
    trains = [each for each in planned if each.label.startswith(TRAINING_STAGES)]
    return any(each.status not in {"hit", "likely_reuse"} for each in trains)


def _check_store(uri: str) -> None:
    """A store that nobody answers for, or that does not let us, is refused by its setting."""
    try:
        open_storage(uri).probe()
    except ConfigError as error:
        raise ConfigError("location.store", error.problem) from error
    except StoreDeniedError as error:
        raise ConfigError("location.store", str(error)) from error
    except StoreError as error:
        raise type(error)(f"location.store: {error}") from error
    except OSError as error:
        raise ConfigError(
            "location.store",
            f"got {uri}, which cannot be made or written to ({error.strerror}); need a directory "
            "of yours; name another",
        ) from error


def check_tracking_database(uri: str) -> None:
    """Refuse a database of runs where its locks do not hold.

    Args:
        uri: of the tracker.

    Raises:
        ConfigError: it is a file on a network disk.
    """
    if not uri.startswith("sqlite:///"):
        return
    kind = file_system_of(Path(uri.removeprefix("sqlite:///")).absolute())
    if kind in NETWORK:
        raise ConfigError(
            "location.tracking_uri",
            f"got {uri}, which is on {kind}; sqlite needs a local disk; set it, or "
            "MLFLOW_TRACKING_URI, to a server",
        )


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


def _training_sections(recipe: Recipe) -> Iterator[SupervisedConfig | RLConfig]:
    """Of the stages that write step checkpoints."""
    sections = (recipe.sft, recipe.reward_model, recipe.preference)
    yield from (section for section in sections if section is not None)
    if recipe.rl.num_rounds:
        yield recipe.rl


def look_of(recipe: Recipe) -> Look | None:
    """What of a recipe is worth a look; None where all of it is made by the run itself."""
    ours = {row.name for row in REWARDS.rows}
    own = {*recipe.rl.reward.functions} <= ours
    reward, teacher = recipe.rl.reward, recipe.rl.distillation
    has_rounds = recipe.rl.num_rounds > 0
    has_critic = has_rounds and recipe.rl.critic is not None
    self_play = recipe.preference.self_play if recipe.preference else None
    samples = has_rounds or (self_play is not None and self_play.source == "best_worst")
    read = (recipe.model.path, recipe.against, teacher, *reward.models)
    is_made = all(each is None for each in read)
    suites = recipe.suites.values()
    all_own = own and all(
        {*suite.reward.functions} <= ours for suite in suites if suite.reward is not None
    )
    data = (recipe.data, *recipe.data_suites.values())
    if all_own and is_made and all(each and each.arithmetic for each in data):
        return None
    return Look(
        model=recipe.model,
        trains=recipe.trains,
        against=recipe.against,
        data=recipe.data,
        suites=recipe.suites,
        training=recipe.training,
        averages=_averages(recipe),
        reward=None if own else recipe.rl.reward,
        scoring=reward,
        scored=("rl", "evaluation") if samples else ("evaluation",),
        reward_model=reward.model,
        # An evaluation has a rank of its own for it, whatever trained the policy.
        reward_training=recipe.training if has_rounds else TrainingConfig(),
        judge=reward.judge,
        teacher=teacher,
        rollout_engine=recipe.rollout.engine,
        self_play=self_play,
        has_critic=has_critic,
        trains_values=has_critic or recipe.reward_model is not None,
        answer_lengths={
            stage.answer_setting: stage.evaluation.answer_length
            for stage in recipe.stages()
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
