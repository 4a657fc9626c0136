"""Checks of an algorithm's configuration that need the plugin tables, before anything is loaded."""

from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from infra.errors import ConfigError


def validate_algorithm(
    algorithm: AlgorithmConfig,
    *,
    group_size: int | None = None,
    max_new_tokens: int | None = None,
    path: str = "rl.algorithm",
) -> None:
    """Refuse a configuration that names unknown parts or cannot work.

    Args:
        algorithm: what to check.
        group_size: samples per prompt, when known.
        max_new_tokens: length limit of a response, when known.
        path: where the configuration stands, for the error text.

    Raises:
        ConfigError: one line that says what is wrong and what to do.
    """
    estimator = check_parts(algorithm)
    if estimator.group_relative and group_size is not None and group_size < 2:
        raise ConfigError(
            f"{path.rpartition('.')[0] or path}.group_size",
            f"got {group_size}; need at least 2 with adv_estimator {estimator.name!r}, which "
            "compares the samples of one prompt; raise it, or choose another estimator",
        )
    overlong = algorithm.overlong
    if overlong.enable and max_new_tokens is not None and overlong.buffer_length > max_new_tokens:
        raise ConfigError(
            f"{path}.overlong.buffer_length",
            f"got {overlong.buffer_length}; need at most max_new_tokens {max_new_tokens}; lower it",
        )
