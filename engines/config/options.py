"""Check that the parts named in a configuration exist and accept their options.

Imports no part and no torch. The plan checks first, the job checks last.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.config.algorithm import AlgorithmConfig, RewardConfig, RewardFunction
from engines.config.backends import ENGINES
from engines.config.base import StrictModel
from engines.config.data import AUTO, SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.plugins import PREPROCESSORS, REWARDS, ROLLOUT_ENGINES, RewardRow
from engines.config.rollout import RolloutConfig
from engines.config.rows import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, AlgorithmRow
from engines.config.training import TrainingConfig
from infra.errors import ConfigError, refuse
from infra.names import unknown_name
from infra.plugins import Row, load_row

CODE = "code"
"""Name of a reward that would execute code written by the model."""


class NoOptions(StrictModel):
    """The schema of a part without options."""


def own_options(options: Mapping[str, Any], row: Row, path: str) -> StrictModel:
    """Return those of `options` that a part's schema has, validated; none without a schema.

    Raises:
        ConfigError: a value is missing or bad, or an external schema does not load.
    """
    schema = schema_of(row, path) or NoOptions
    return schema.validated(
        {key: value for key, value in options.items() if key in schema.model_fields}, path
    )


def check_options(options: Mapping[str, Any], rows: Sequence[Row], path: str) -> None:
    """Refuse an option that no part in `rows` accepts, or that has a bad value.

    An external part without a schema accepts any key. Raises `ConfigError` below `path`.
    """
    schemas = [schema_of(row, path) for row in rows]
    known = sorted({key for schema in schemas if schema for key in schema.model_fields})
    for key in options:
        if None not in schemas and key not in known:
            names = " and ".join(dict.fromkeys(row.name for row in rows))
            raise ConfigError(
                f"{path}.{key}", f"not an option of {names}: {unknown_name(key, known)}"
            )
    for row in rows:
        own_options(options, row, path)


def schema_of(row: Row, path: str) -> type[StrictModel] | None:
    """Return the schema of a part's options; None for an external part without one."""
    if row.options is None:
        return NoOptions if row.is_ours else None
    return load_row(Row(name=f"{row.name} (options)", target=row.options, owner=row.owner), path)


def check_backend(training: TrainingConfig) -> None:
    """Refuse an unusable training backend, or options that it accepts on none of its devices."""
    ENGINES.find(training.backend)
    refusals: list[ConfigError] = []
    rows = ENGINES.find_all(training.backend)
    for row in rows:
        try:
            check_options(training.options, [row], "training.options")
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == len(rows):
        raise refusals[0]


def check_rollout(rollout: RolloutConfig) -> None:
    """Refuse an unusable rollout engine, or options that it does not accept."""
    refuse(
        rollout.openai_endpoint and rollout.placement == "colocated",
        "rollout.openai_endpoint",
        "got true with rollout.placement colocated; need disaggregated: an engine on the "
        "devices of the ranks answers the ranks alone",
    )
    size = rollout.options.get("tensor_parallel_size", 1)
    refuse(
        size != 1 and rollout.placement == "colocated",
        "rollout.options.tensor_parallel_size",
        f"got {size} with rollout.placement colocated, where each "
        "rank's device has an engine of its own; need 1; set it, or choose disaggregated",
    )
    check_options(rollout.options, [ROLLOUT_ENGINES.find(rollout.engine)], "rollout.options")


def check_parts(algorithm: AlgorithmConfig) -> AlgorithmRow:
    """Check that all parts exist and take the options (`ConfigError`); return the estimator."""
    estimator = ADVANTAGES.find(algorithm.adv_estimator)
    loss = POLICY_LOSSES.find(algorithm.loss_mode)
    KL_ESTIMATORS.find(algorithm.kl_loss_type.removesuffix("+"))
    KL_ESTIMATORS.find(algorithm.kl_penalty, "rl.algorithm.kl_penalty")
    check_options(algorithm.options, [estimator, loss], "rl.algorithm.options")
    return estimator


def check_reward(reward: RewardConfig) -> RewardRow | None:
    """Check the reward and its arguments (`ConfigError`); return its row, or None for a file."""
    rows = [check_reward_function(part, path) for path, part in reward.parts.items()]
    return REWARDS.find(reward.function) if reward.components else rows[0]


def check_reward_function(part: RewardFunction, path: str) -> RewardRow | None:
    """Check a function and its arguments (`ConfigError`); return its row, or None for a file."""
    refuse(
        part.function == CODE and CODE not in REWARDS.names(),
        f"{path}.function",
        f"got {CODE}, which runs programs that a model wrote; need a sandbox, which this "
        "project lacks; set it to http, and kwargs.url to your own sandbox",
    )
    if part.file is None:
        row = REWARDS.find(part.function, f"{path}.function")
        check_options(part.kwargs, [row], f"{path}.kwargs")
        return row
    if not part.file.expanduser().is_file():
        raise ConfigError(
            f"{path}.function",
            f"{part.file} is no file (cwd is {Path.cwd()}); need a Python file with the function",
        )
    return None


def check_preprocessors(data: DataConfig) -> None:
    """Refuse unknown layouts, and options that a layout does not have."""
    for split in SOURCE_SPLITS:
        for place, source in enumerate(getattr(data, split)):
            field = f"data.{split}.{place}"
            if source.format != AUTO:
                check_preprocessor(source, field)
            elif source.options:
                raise ConfigError(
                    f"{field}.options",
                    f"got {', '.join(source.options)}; format auto takes none; name the format",
                )


def check_preprocessor(source: SourceConfig, field: str) -> Row:
    """Check a source at `field` (`data.rl.0`) and its options; return the row of its layout."""
    row = PREPROCESSORS.find(source.format, f"{field}.format")
    check_options(source.options, [row], f"{field}.options")
    return row
