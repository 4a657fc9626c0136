"""The parts that a configuration names, and their options: both exist, before anything runs.

Promises: a name is looked up in the table of its kind, its options are validated by the schema that
the row names; no part is imported and no torch. The plan asks this first, the job asks it last.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engines.config.algorithm import AlgorithmConfig, RewardConfig, RewardFunction
from engines.config.backends import ENGINES
from engines.config.base import StrictModel
from engines.config.data import AUTO, SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.plugins import PREPROCESSORS, REWARDS, ROLLOUT_ENGINES, RewardRow
from engines.config.rollout import RolloutConfig
from engines.config.rows.algorithm import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, AlgorithmRow
from engines.config.training import TrainingConfig
from infra.errors import ConfigError
from infra.field_errors import to_config_error
from infra.names import unknown_name
from infra.plugins import Row, load_row

CODE = "code"
"""Name of the reward that executes code of the model."""


class NoOptions(StrictModel):
    """The schema of a part that has no options of its own."""


def own_options(options: Mapping[str, Any], row: Row, path: str) -> StrictModel:
    """A part's share of the options that it has in common with others, validated.

    Args:
        row: of the part. One of others that names no schema gets none here: it reads what the
            user wrote by itself.
        path: where the options stand, for the error text.

    Raises:
        ConfigError: a value is missing or bad, or the schema of another's part does not load.
    """
    schema = schema_of(row, path) or NoOptions
    own = {key: value for key, value in options.items() if key in schema.model_fields}
    try:
        return schema.model_validate(own)
    except ValidationError as error:
        raise to_config_error(error, schema, path) from None


def check_options(options: Mapping[str, Any], rows: Sequence[Row], path: str) -> None:
    """Refuse options that the parts they are meant for do not take.

    Args:
        rows: of the parts that share them; every key must belong to one. Where one of others names
            no schema, any key may be its.
        path: where the options stand, for the error text.

    Raises:
        ConfigError: a key belongs to no part, or `own_options` refuses a value.
    """
    schemas = [schema_of(row, path) for row in rows]
    known = sorted({key for schema in schemas if schema for key in schema.model_fields})
    for key in options:
        if None not in schemas and key not in known:
            names = " and ".join(dict.fromkeys(row.name for row in rows))
            problem = f"not an option of {names}: {unknown_name(key, known)}"
            raise ConfigError(f"{path}.{key}", problem)
    for row in rows:
        own_options(options, row, path)


def check_options_somewhere(options: Mapping[str, Any], rows: Sequence[Row], path: str) -> None:
    """Refuse options that a part takes on none of its devices; the job knows on which it is.

    Args:
        rows: of the part, one for each place.
        path: where the options stand, for the error text.

    Raises:
        ConfigError: what `check_options` says of the first place.
    """
    refusals: list[ConfigError] = []
    for row in rows:
        try:
            check_options(options, [row], path)
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == len(rows):
        raise refusals[0]


def schema_of(row: Row, path: str) -> type[StrictModel] | None:
    """The schema of a part's options; None where others did not name one.

    Args:
        path: where the options stand, for the error text.

    Raises:
        ConfigError: another's schema does not load.
    """
    if row.options is None:
        return NoOptions if row.is_ours else None
    return load_row(Row(name=f"{row.name} (options)", target=row.options, owner=row.owner), path)


def check_backend(training: TrainingConfig) -> None:
    """Refuse a training backend that cannot be used, or options that it does not take anywhere."""
    ENGINES.find(training.backend)
    places = ENGINES.find_all(training.backend)
    check_options_somewhere(training.options, places, "training.options")


def check_rollout(rollout: RolloutConfig) -> None:
    """Refuse a rollout engine that cannot be used, or options that it does not take."""
    if rollout.openai_endpoint and rollout.placement == "colocated":
        raise ConfigError(
            "rollout.openai_endpoint",
            "got true with rollout.placement colocated; need disaggregated: an engine on the "
            "devices of the ranks answers the ranks alone",
        )
    size = rollout.options.get("tensor_parallel_size", 1)
    if size != 1 and rollout.placement == "colocated":
        raise ConfigError(
            "rollout.options.tensor_parallel_size",
            f"got {size} with rollout.placement colocated, where each "
            "rank's device has an engine of its own; need 1; set it, or choose disaggregated",
        )
    check_options(rollout.options, [ROLLOUT_ENGINES.find(rollout.engine)], "rollout.options")


def check_parts(algorithm: AlgorithmConfig) -> AlgorithmRow:
    """The row of the advantage estimator; all parts exist and take the options."""
    estimator = ADVANTAGES.find(algorithm.adv_estimator)
    loss = POLICY_LOSSES.find(algorithm.loss_mode)
    KL_ESTIMATORS.find(algorithm.kl_loss_type.removesuffix("+"))
    KL_ESTIMATORS.find(algorithm.kl_penalty, "rl.algorithm.kl_penalty")
    check_options(algorithm.options, [estimator, loss], "rl.algorithm.options")
    return estimator


def check_reward(reward: RewardConfig) -> RewardRow | None:
    """The row of the reward, all arguments checked; None for a file, which must exist."""
    rows = [check_reward_function(part, path) for path, part in reward.parts.items()]
    return REWARDS.find(reward.function) if reward.components else rows[0]


def check_reward_function(part: RewardFunction, path: str) -> RewardRow | None:
    """The row of one function, its arguments checked; None for a file, which must exist.

    Args:
        part: the reward, or a component of it.

    Raises:
        ConfigError: names the setting.
    """
    if part.function == CODE and CODE not in REWARDS.names():
        raise ConfigError(
            f"{path}.function",
            f"got {CODE}, which runs programs that a model wrote; need a sandbox, which is not "
            "here; set it to http, and kwargs.url to a sandbox of yours",
        )
    if part.file is None:
        row = REWARDS.find(part.function, f"{path}.function")
        check_options(part.kwargs, [row], f"{path}.kwargs")
        return row
    if not part.file.expanduser().is_file():
        problem = f"{part.file} does not exist (cwd is {Path.cwd()})"
        raise ConfigError(f"{path}.function", problem)
    return None


def check_preprocessors(data: DataConfig) -> None:
    """Refuse unknown layouts and options that they do not have."""
    for split in SOURCE_SPLITS:
        for place, source in enumerate(getattr(data, split)):
            field = f"data.{split}.{place}"
            if source.format != AUTO:
                check_preprocessor(source, field)
            elif source.options:
                given = ", ".join(source.options)
                raise ConfigError(
                    f"{field}.options", f"got {given}; format auto takes none; name the format"
                )


def check_preprocessor(source: SourceConfig, field: str) -> Row:
    """The row of a source's layout, its options checked.

    Args:
        source: its `format` and `options`.
        field: the source's place in the configuration (`data.rl.0`).
    """
    row = PREPROCESSORS.find(source.format, f"{field}.format")
    check_options(source.options, [row], f"{field}.options")
    return row
