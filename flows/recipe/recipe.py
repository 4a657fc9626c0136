"""Loads a recipe from a YAML file or from plain data, and checks its fields against each other.

Promises: `load_recipe` returns a recipe with consistent fields or raises one `ConfigError` line, in
well under a second and without torch. The line names the field and the problem. An existing local
path becomes absolute, because jobs run in other directories; anything else, such as a hub id, is
not changed.
Does not promise: that data and models are well formed; `flows.preflight` checks them.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engines.config.algorithm import RewardConfig
from engines.config.base import StrictModel
from engines.config.data import DATA_SUFFIXES, SOURCE_SPLITS, DataConfig, unpacked_suffix
from engines.config.options import (
    check_backend,
    check_parts,
    check_preprocessors,
    check_reward,
    check_rollout,
)
from engines.config.plugins import TRACKERS
from engines.config.recipe import Recipe
from engines.config.rules.batches import check_answer_length
from engines.config.sections import EvaluationConfig
from engines.config.stages.base import StageConfig
from flows.recipe.source import read_recipe, refuse_secrets, registered_model
from flows.stage_order import stages_of
from infra.errors import ConfigError
from infra.field_errors import to_config_error
from infra.names import unknown_name

NUM_SIMILAR_FILES = 3
_OF_TASKS = "a harness's tasks define their own prompts and scores; remove it"
_NOT_TRAINED = "nothing is trained here; remove it"
MEASURED = re.compile(r"sft|preference(_\d+)?|rl_round_\d+|incumbent|final|(.*_)?against")
"""Labels that evaluations of stages have, which suite names must not match."""


def parse_recipe(data: Any) -> Recipe:
    """Parse and check a recipe of nested mappings, as YAML or JSON gives them.

    Raises:
        ConfigError: the recipe is invalid.
    """
    refuse_secrets(data)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise to_config_error(error, Recipe) from None
    return prepare_recipe(recipe)


def prepare_recipe(recipe: Recipe) -> Recipe:
    """Make local paths absolute, and check the fields against each other.

    Raises:
        ConfigError: the recipe is invalid.
    """
    recipe = recipe.with_models(lambda _, path: _absolute(path))
    suites = {
        name: suite.model_copy(
            update={
                "data": suite.data and _absolute_data(suite.data),
                "harness": suite.harness
                and suite.harness.model_copy(
                    update={"include": suite.harness.include and _absolute(suite.harness.include)}
                ),
                "reward": suite.reward and _absolute_reward(suite.reward),
            }
        )
        for name, suite in recipe.suites.items()
    }
    rl = recipe.rl.model_copy(update={"reward": _absolute_reward(recipe.rl.reward)})
    data = recipe.data and _absolute_data(recipe.data)
    recipe = recipe.model_copy(update={"data": data, "rl": rl, "suites": suites})
    check_recipe(recipe)
    return recipe


def load_recipe(
    name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None
) -> Recipe:
    """Load a recipe with overrides and check it.

    Args:
        name_or_path: a shipped name (`quickstart`) or a YAML file.
        overrides: `path.to.key=value` in order, the value in YAML; mappings are merged.

    Raises:
        ConfigError: the recipe is invalid.
    """
    data = read_recipe(name_or_path, overrides)
    if seed is not None:
        data["seed"] = seed
    return parse_recipe(data)


def _absolute_data(data: DataConfig) -> DataConfig:
    sources = {
        split: tuple(
            source.model_copy(update={"path": _absolute(source.path)})
            for source in getattr(data, split)
        )
        for split in SOURCE_SPLITS
    }
    return data.model_copy(update=sources)


def _absolute_reward(reward: RewardConfig) -> RewardConfig:
    return reward.with_functions(
        {
            path: f"{_absolute(str(part.file))}:{part.function_in_file}"
            for path, part in reward.parts.items()
            if part.file is not None
        }
    )


def _absolute(path: str) -> str:
    local = Path(path).expanduser()
    return str(local.resolve()) if local.exists() else path


def check_recipe(recipe: Recipe) -> None:
    """Check a recipe's fields against each other and against what is installed.

    Raises:
        ConfigError: the first rule that is violated.
    """
    _check_plugins(recipe)
    _check_lengths(recipe)
    _check_warmup(recipe)
    _check_data(recipe)
    for setting, path in recipe.models():
        if registered_model(setting, path) is None:
            _check_path(setting, path)
    if not recipe.trains:
        _check_measured_alone(recipe)
    if recipe.preference and recipe.preference.self_play and recipe.sft is None:
        raise ConfigError(
            "preference.self_play",
            "got one with sft: null, and no policy that could play; need a stage before it; give "
            "the recipe a section sft",
        )
    num_trained = (
        (recipe.sft is not None) + len(recipe.preference_iterations) + recipe.rl.num_rounds
    )
    if recipe.soup and recipe.soup.num_policies > num_trained:
        raise ConfigError(
            "soup.num_policies",
            f"got {recipe.soup.num_policies}; need at most {num_trained}, the policies that this "
            "recipe trains; lower it, or raise rl.num_rounds",
        )
    if recipe.against is not None and recipe.against.init == "random":
        raise ConfigError("against.init", "got random; need an existing model; set against.path")
    _check_promotion(recipe)
    if recipe.promote.suite is not None and recipe.promote.suite not in recipe.suites:
        raise ConfigError("promote.suite", unknown_name(recipe.promote.suite, [*recipe.suites]))
    if recipe.promote.suite in recipe.harness_suites:
        raise ConfigError(
            "promote.suite",
            f"got {recipe.promote.suite}, which a harness asks; need a suite with data, or null "
            "for the recipe's own problems; choose one",
        )
    if recipe.asks_reward_model and recipe.reward_model is None:
        raise ConfigError(
            "rl.reward.model.path",
            "missing, and no stage trains a reward model; need a model directory or a hub id; set "
            "it, or give the recipe a section reward_model",
        )
    stages = stages_of(recipe)  # last, because the order of stages relies on the rules above
    _check_options(recipe.stages, stages)
    _check_rows(recipe.data, stages)
    for stage in stages:
        stage.check()


def _check_options(options: Iterable[str], stages: Sequence[StageConfig]) -> None:
    """Check that a stage of the run reads each entry of `stages`."""
    read = {stage.stage for stage in stages if stage.options}
    for name in options:
        if name not in read:
            known = f"need {' or '.join(sorted(read))}" if read else "none has settings here"
            raise ConfigError(
                f"stages.{name}", f"no stage of this run reads it; {known}; remove it"
            )


def _check_rows(data: DataConfig | None, stages: Sequence[StageConfig]) -> None:
    if data is None:
        return
    for name in sorted({name for stage in stages for name in stage.rows}):
        if data.arithmetic is None and not getattr(data, name):
            only_sft = [stage.stage for stage in stages if name in stage.rows] == ["sft"]
            or_none = ", or set sft: null" if only_sft else ""
            raise ConfigError(
                f"data.{name}",
                f"missing; the recipe has a stage that reads it; add a source{or_none}",
            )
        if data.arithmetic and name != "evaluation" and not getattr(data.arithmetic, f"num_{name}"):
            raise ConfigError(
                f"data.arithmetic.num_{name}",
                "got 0; the recipe has a stage that trains on these rows; need 1 or more; raise it",
            )


def _check_promotion(recipe: Recipe) -> None:
    """Check that the evaluation that decides on promotion reports `promote.metric`."""
    suite, metric = recipe.suites.get(recipe.promote.suite or ""), recipe.promote.metric
    evaluation = suite.evaluation if suite else recipe.evaluation
    k = int(metric.partition("@")[2] or 0)
    if k and not (evaluation.num_samples and k in evaluation.pass_at):
        where = f"suites.{recipe.promote.suite}.evaluation" if suite else "evaluation"
        raise ConfigError(
            "promote.metric",
            f"got {metric}; {where} has num_samples {evaluation.num_samples} and pass_at "
            f"{list(evaluation.pass_at)}; need {k} in pass_at; add it, or take another metric",
        )


def _check_plugins(recipe: Recipe) -> None:
    check_backend(recipe.training)
    check_rollout(recipe.rollout)
    check_parts(recipe.rl.algorithm)
    check_reward(recipe.rl.reward)
    for data in (recipe.data, *recipe.data_suites.values()):
        if data is not None:
            check_preprocessors(data)
    TRACKERS.find(recipe.location.tracker)
    for name in recipe.location.mirrors:
        TRACKERS.find(name, "location.mirrors")


def _check_warmup(recipe: Recipe) -> None:
    """Check that the warm-up is shorter than the training, so that the learning rate is reached."""
    rl = recipe.rl
    num_steps = rl.num_rounds * rl.num_steps_per_round
    num_batches = num_steps * (rl.batch_size_prompts // rl.prompts_per_update)
    trainings = [("rl", rl.optimizer, num_batches * rl.num_epochs)]
    if rl.critic is not None:
        num_critic_steps = num_batches * (rl.critic.num_epochs or rl.num_epochs)
        trainings.append(("rl.critic", rl.critic.optimizer, num_critic_steps))
    for name in ("sft", "reward_model", "preference"):
        if section := getattr(recipe, name):
            trainings.append((name, section.optimizer, section.num_steps))
    for name, optimizer, num_steps in trainings:
        if num_steps and optimizer.num_warmup_steps >= num_steps:
            raise ConfigError(
                f"{name}.optimizer.num_warmup_steps",
                f"got {optimizer.num_warmup_steps}; need less than the {num_steps} optimizer steps "
                "of the training, or the rate never reaches lr; lower it",
            )


def _check_lengths(recipe: Recipe) -> None:
    """Check that the longest prompt and answer fit into the context.

    Prompts of `spin` are beginnings of conversations, whose length is unlimited.
    """
    if recipe.data is None or not recipe.trains:
        return
    prompt, limit = recipe.data.max_prompt_length, recipe.model.max_length
    answers = {
        "rl.sampling.max_new_tokens": recipe.rl.sampling.max_new_tokens,
        "evaluation.max_new_tokens": recipe.evaluation.max_new_tokens,
    }
    plays = recipe.preference.self_play if recipe.preference else None
    if plays and plays.sampling and plays.source == "best_worst":
        answers["preference.self_play.sampling.max_new_tokens"] = plays.sampling.max_new_tokens
    for path, answer in answers.items():
        check_answer_length(path, answer or 0, limit, prompt)
    if recipe.rl.num_rounds:
        recipe.training.check_unit(
            prompt + recipe.rl.sampling.max_new_tokens, "a prompt with its answer"
        )


def _check_data(recipe: Recipe) -> None:
    for name, suite in recipe.suites.items():
        include = suite.harness.include if suite.harness else None
        if include and not Path(include).expanduser().is_dir():
            raise ConfigError(
                f"suites.{name}.harness.include",
                f"{include} is no directory (cwd is {Path.cwd()}); need one with YAML files",
            )
        if MEASURED.fullmatch(name):
            raise ConfigError(
                f"suites.{name}", "that is the name of a stage's evaluation; choose another one"
            )
        if suite.data:
            _check_sources(suite.data, suite.evaluation, f"suites.{name}.")
    data = recipe.data
    if data is None:
        if recipe.trains:
            raise ConfigError(
                "data",
                "missing; set data.arithmetic, or the sources that the stages read, of data.sft, "
                "data.preference, data.rl and data.evaluation",
            )
        return
    plays = recipe.preference is not None and recipe.preference.self_play is not None
    if plays and recipe.reward_model is None and data.preference:
        raise ConfigError(
            "data.preference",
            "got a source, which preference.self_play does not use; remove one of them",
        )
    _check_sources(data, recipe.evaluation, "")


def _check_sources(data: DataConfig, evaluation: EvaluationConfig, section: str) -> None:
    """Check that files exist, and that as many problems are generated as are requested."""
    for split in SOURCE_SPLITS:
        for index, source in enumerate(getattr(data, split)):
            _check_path(f"{section}data.{split}.{index}.path", source.path)
    asked = evaluation.num_problems or 0
    if data.arithmetic is not None and data.arithmetic.num_eval < asked:
        raise ConfigError(
            f"{section}evaluation.num_problems",
            f"got {asked}; {section}data.arithmetic.num_eval makes {data.arithmetic.num_eval}; "
            "raise that or lower this",
        )


def _check_path(setting: str, text: str) -> None:
    """Refuse a missing file if the text can only be a path; `owner/name` may be a hub id."""
    path = Path(text).expanduser()
    is_path = (
        text.startswith(("/", "./", "../", "~"))
        or unpacked_suffix(path) in DATA_SUFFIXES
        or len(path.parts) > 2
    )
    if is_path and not path.exists():
        near = sorted(
            each.name for each in path.parent.glob("*") if unpacked_suffix(each) in DATA_SUFFIXES
        )
        beside = f"; beside it: {', '.join(near[:NUM_SIMILAR_FILES])}" if near else ""
        raise ConfigError(setting, f"{text} does not exist (cwd is {Path.cwd()}{beside})")


def _check_measured_alone(recipe: Recipe) -> None:
    """Check that a recipe without training evaluates something and sets no unused field.

    A recipe without data of its own must not set what only its suites define.
    """
    if recipe.model.init == "random":
        raise ConfigError(
            "rl.num_rounds",
            "got 0 with sft: null; nothing would be trained; raise it, add sft, or name a model to "
            "measure (model.path)",
        )
    if recipe.reward_model is not None:
        raise ConfigError(
            "reward_model", "got a section, and no policy is trained here; remove it, or add rl"
        )
    if recipe.data is not None:
        return
    if not recipe.suites:
        raise ConfigError("data", "missing, and there are no suites to measure; add one of them")
    some = next(iter(recipe.data_suites), None)
    why_evaluation = why_reward = _OF_TASKS
    if some is not None:
        why_evaluation = (
            "the recipe has no data of its own, and this changes no suite; set "
            f"suites.{some}.evaluation.{{}} instead"
        )
        why_reward = f"every suite has a reward of its own; set suites.{some}.reward.{{}} instead"
    confidence = {"confidence"} if recipe.harness_suites else set[str]()
    _refuse("evaluation", recipe.evaluation, confidence, why_evaluation)
    if all(recipe.suites[name].reward for name in recipe.data_suites):
        _refuse("rl.reward", recipe.rl.reward, set(), why_reward)
    _refuse("rl.sampling", recipe.rl.sampling, {"max_new_tokens", "stop", "stop_token_ids"},
            _NOT_TRAINED)  # fmt: skip
    _refuse("rl", recipe.rl, {"num_rounds", "sampling", "reward"}, _NOT_TRAINED)
    for name in ("promote", "checkpoint", "merge"):
        _refuse(name, getattr(recipe, name), set(), _NOT_TRAINED)


def _refuse(path: str, section: StrictModel, used: set[str], why: str) -> None:
    """Raise ConfigError if a field outside `used` has a non-default value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name not in used and value != field.get_default(call_default_factory=True):
            shown = "other values" if isinstance(value, StrictModel) else repr(value)
            raise ConfigError(f"{path}.{name}", f"got {shown}; {why.format(name)}")
