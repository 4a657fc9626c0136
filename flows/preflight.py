"""Resolves a recipe on this machine, and checks what it names, before a run starts.

Promises: these errors are found before a job starts: a store that is missing,
not writable or without safe locks, a missing shard, an adapter that matches no layer, a missing
column, a platform that is unavailable or has no engine in the training backend, a plugin that
cannot be imported, and a reward that cannot be called. A recipe whose models, data and rewards are
built in needs no child process but the device probe. Else a child loads what this process must not:
torch, plugins, users' rewards; it answers within the deadline, or an error of one line is raised.
Does not promise: errors that only the whole data or the weights can show.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from engines.config.backends import ENGINES
from engines.config.plugins import REWARDS, TABLES, PluginKind
from engines.config.preflight_request import PreflightAnswer, PreflightRequest
from engines.config.recipe import Recipe
from engines.config.stages.final import EvaluateStageConfig
from engines.config.training import TrainingConfig
from flows.machine_plan import check_quantization_on, device_shortage, resolved_here
from flows.machine_survey import (
    ask,
    check_devices,
    memory_shortage,
    resolve_hardware,
    surveyed,
)
from flows.plan import plan_run
from flows.recipe.source import registered_model
from flows.run.registry import find_registered, open_tracker
from flows.stage_order import stages_of
from infra import env
from infra.errors import (
    ArtifactError,
    ConfigError,
    StoreDeniedError,
    StoreError,
)
from infra.host.records import make_place
from infra.redact import redact
from infra.services.stack import tracking_address
from infra.store.storage import Storage, open_storage


def request_of(recipe: Recipe) -> PreflightRequest | None:
    """Return what the child process checks; None if models, data and rewards are all built in."""
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
        # An evaluation runs the reward model on its own rank, whatever the training settings.
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
        ServiceError: a child process failed, or the registry does not answer.
        StoreError: the service of the store failed or does not answer.
    """
    make_place(recipe.home, "home", "set RLHF_HOME, or location.home of the recipe")
    if recipe.location.home:  # file caches of this process and its jobs are there
        env.set_for_process(env.RLHF_HOME.name, str(recipe.home))
    check_store(recipe.store_uri)
    check_tracking_database(recipe.location.tracking_uri or tracking_address(recipe.home))
    recipe = with_registered_models(recipe, open_storage(recipe.store_uri))
    hardware = resolve_hardware(recipe.hardware, recipe.home)
    is_here = hardware != recipe.hardware  # a complete setting may be for another machine
    if is_here:
        check_devices(recipe.training.num_workers, hardware, recipe.home)
        if recipe.rollout.quantization and recipe.rl.num_rounds:
            check_quantization_on(recipe, surveyed(hardware.platform, recipe.home))
    on_device = is_here and hardware.is_accelerator
    found = surveyed(hardware.platform, recipe.home) if on_device else None
    asked = recipe.training
    has_compiler = found is not None and found.has_compiler
    training = asked.on(accelerator=hardware.is_accelerator, has_compiler=has_compiler)
    recipe = recipe.model_copy(update={"hardware": hardware, "training": training})
    _check_parts(recipe)
    request, checkpoint_bytes = request_of(recipe), None
    if request is not None:
        recipe, checkpoint_bytes = _answered(recipe, request)
    if found is not None:
        own = {"gradient_checkpointing": asked.gradient_checkpointing}
        recipe = recipe.model_copy(update={"training": training.model_copy(update=own)})
        recipe = resolved_here(recipe, found)
    if checkpoint_bytes is not None:
        check_room(recipe, checkpoint_bytes, force)
    if found is not None and not env.RAY_ADDRESS.get():
        shortage = device_shortage(recipe, found)
        if shortage and _trains(recipe, force):
            raise ConfigError("model.path", f"got {recipe.model.path}: {shortage}")
    return recipe


def _answered(recipe: Recipe, request: PreflightRequest) -> tuple[Recipe, int | None]:
    """Return the recipe with what the child process found, and the bytes of a checkpoint."""
    answer = ask(
        PreflightAnswer,
        "the preflight of models, data and rewards",
        DEADLINE_S,
        ["engines.jobs.preflight.run"],
        request.model_dump_json(),
    )
    found = answer.found
    if found is None:
        raise ConfigError(answer.path or "recipe", str(answer.problem))
    reward = recipe.rl.reward.model_copy(update={"model": found.reward_model, "judge": found.judge})
    rl = recipe.rl.model_copy(update={"reward": reward, "distillation": found.teacher})
    sections = {name: getattr(found, name) for name in ("model", "against", "data", "suites")}
    return recipe.model_copy(update={**sections, "rl": rl}), found.checkpoint_bytes


def with_registered_models(recipe: Recipe, storage: Storage) -> Recipe:
    """Replace each model that is named by an alias with the directory of its files in the store.

    The fingerprint covers the files' bytes, so moving the alias changes it.

    Raises:
        ConfigError: the alias does not exist, or the store does not have the files.
        ServiceError: the registry does not answer.
    """
    tracker = open_tracker(recipe.location)

    def directory(setting: str, path: str) -> str:
        asked = registered_model(setting, path)
        if asked is None:
            return path
        found = find_registered(tracker, *asked, "run it again once it answers")
        if found is None:
            raise ConfigError(
                setting,
                f"got {path}, and no version has that alias in {redact(tracker.address)}; need a "
                "registered model; run the recipe that promotes it, or name a directory or a hub "
                "id",
            )
        try:
            return str(storage.local_copy(found.artifact))
        except (ArtifactError, ValueError):  # ValueError: a version that no pipeline registered
            raise ConfigError(
                setting,
                f"got {path}, which is version {found.version} ({found.artifact.uri}); need its "
                f"files in {storage.uri}; take the store that has them (location.store), or name "
                "a directory",
            ) from None

    return recipe.with_models(directory)


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


NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "afs", "fuse.sshfs", "fuse.glusterfs"})
"""File systems on which database locks are unreliable."""
MOUNTS = Path("/proc/self/mounts")


def file_system_of(path: Path) -> str | None:
    """Return the type (`ext4`, `nfs4`) of an absolute path's file system; None if it is unknown."""
    try:
        # Not psutil: it reads /etc/mtab, which may be a stale file in a container.
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place, found = path.resolve(), ("", None)
    for line in lines:
        mounted, kind = (
            re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
            for text in line.split(" ")[1:3]
        )
        # A later mount on the same path hides an earlier one.
        if place.is_relative_to(mounted) and len(mounted) >= len(found[0]):
            found = (mounted, kind)
    return found[1]


NUM_CHECKPOINTS = 2
"""The newest checkpoint stays until the next one is complete."""
TRAINING_STAGES = ("sft", "reward_model", "preference", "rl_round")
"""Label prefixes of the stages that write step checkpoints."""


def check_store(uri: str) -> None:
    """Check that the store answers and allows access.

    Raises:
        ConfigError: names `location.store`.
        StoreError: its service failed or does not answer.
    """
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
    """Check that an SQLite database of runs is on a disk with working locks.

    Raises:
        ConfigError: it is on a network disk.
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


def check_room(recipe: Recipe, checkpoint_bytes: int, force: Mapping[str, str]) -> None:
    """Check that the store has space for checkpoints, and the machine memory for training.

    Raises:
        ConfigError: a stage has to train and there is too little, or `plan_run` failed.
    """
    shortage = memory_shortage(checkpoint_bytes, recipe.hardware)
    if shortage and _trains(recipe, force):
        raise ConfigError(
            "model.path",
            f"got {recipe.model.path}: {shortage}; take a smaller model or training.lora, or set "
            "RAY_ADDRESS to a cluster",
        )
    if "://" in recipe.store_uri:  # the free space of a bucket is unknown
        return
    num_checkpoints = NUM_CHECKPOINTS + recipe.keeps_average
    need_bytes = num_checkpoints * checkpoint_bytes
    free_bytes = shutil.disk_usage(recipe.store_uri).free
    if free_bytes < need_bytes and _trains(recipe, force):
        raise ConfigError(
            "location.store",
            f"need {num_checkpoints} x {checkpoint_bytes / 1e9:.1f} GB for checkpoints of "
            f"{recipe.model.path}, {recipe.store_uri} has {free_bytes / 1e9:.1f} GB free; free "
            "some, or name another place",
        )


def _trains(recipe: Recipe, force: Mapping[str, str]) -> bool:
    return any(
        each.label.startswith(TRAINING_STAGES) and each.status not in {"hit", "likely_reuse"}
        for each in plan_run(recipe, force).stages
    )
