"""Checks of an algorithm's configuration that need the registries, before anything is loaded."""

from engines.algorithms import advantage, policy_objective  # noqa: F401  (register their parts)
from engines.algorithms.registry import (
    ADVANTAGES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    Part,
    PartFn,
    Registry,
    parse_options,
)
from engines.config.algorithm import AlgorithmConfig
from engines.config.plugins import refuse_two_owners
from engines.config.rules import check_group_size


def validate_algorithm(
    algorithm: AlgorithmConfig,
    *,
    group_size: int | None = None,
    path: str = "rl.algorithm",
) -> None:
    """Refuse a configuration that names unknown parts or cannot work.

    Args:
        algorithm: what to check.
        group_size: samples per prompt, when known.
        path: where the configuration stands, for the error text.

    Raises:
        ConfigError: one line that says what is wrong and what to do.
    """
    estimator = _part(ADVANTAGES, algorithm.adv_estimator, path)
    loss = _part(POLICY_LOSSES, algorithm.loss_mode, path)
    _part(KL_ESTIMATORS, algorithm.kl_loss_type.removesuffix("+"), path)
    parse_options(algorithm.options, [estimator.options, loss.options], f"{path}.options")
    if estimator.group_relative and group_size is not None:
        check_group_size(estimator.name, group_size)


def _part(registry: Registry[PartFn], name: str, path: str) -> Part[PartFn]:
    """The part of that name, which nobody else may claim, be it imported already or not."""
    setting = f"{path}.{registry.kind}"
    refuse_two_owners(registry.kind, name, setting)
    return registry.get(name, setting)
