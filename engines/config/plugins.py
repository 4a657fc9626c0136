"""The built-in plugins by name, readable without importing any of them.

Each name leads to its class or function as ``module:attribute`` and, where the plugin stands on
a library of an optional extra, to that library. The registries of the engine floor load from
here; the control plane checks names and extras here, long before a job starts.

Does not list plugins of other distributions: those announce themselves as entry points of the
group `rlhf.plugins`, named ``<kind>.<name>`` (``rollout.mine = my_package.engine:MyEngine``).
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Literal

from infra.errors import ConfigError
from infra.names import unknown_name

PluginKind = Literal["backend", "rollout", "adv_estimator", "loss_mode", "kl_loss_type", "reward"]

ENTRY_POINT_GROUP = "rlhf.plugins"


@dataclass(frozen=True)
class Plugin:
    """Where a plugin is, and what it needs beyond the base installation.

    Attributes:
        target: ``module:attribute``.
        requires: importable module that an extra brings; None needs nothing.
        extra: name of that extra.
        group_relative: an advantage estimator that compares samples of one prompt.
    """

    target: str
    requires: str | None = None
    extra: str | None = None
    group_relative: bool = False

    @property
    def module(self) -> str:
        """The module part of `target`."""
        return self.target.partition(":")[0]


_KL = "engines.algorithms.kl"

BUILT_IN: Mapping[PluginKind, Mapping[str, Plugin]] = {
    "backend": {
        "fsdp2": Plugin("engines.training.fsdp.engine:FSDP2Engine"),
    },
    "rollout": {
        "transformers": Plugin("engines.rollout.transformers_engine:TransformersEngine"),
    },
    "adv_estimator": {
        "grpo": Plugin("engines.algorithms.grpo:grpo_advantages", group_relative=True),
    },
    "loss_mode": {
        "vanilla": Plugin("engines.algorithms.ppo_clip:ppo_clip_loss"),
    },
    "kl_loss_type": {
        "k1": Plugin(f"{_KL}:k1"),
        "kl": Plugin(f"{_KL}:k1"),
        "abs": Plugin(f"{_KL}:absolute"),
        "k2": Plugin(f"{_KL}:k2"),
        "mse": Plugin(f"{_KL}:k2"),
        "k3": Plugin(f"{_KL}:k3"),
        "low_var_kl": Plugin(f"{_KL}:k3"),
    },
    "reward": {
        "exact": Plugin("engines.rewards.exact:compute_score"),
        "math": Plugin("engines.rewards.math:compute_score"),
    },
}


def check_plugin(kind: PluginKind, name: str, path: str) -> Plugin | None:
    """Say whether a plugin can be used, without importing it.

    Args:
        kind: which table the name belongs to.
        name: the name in the configuration.
        path: where the name stands in the configuration, for the error line.

    Returns:
        The built-in plugin, or None when another distribution brings it.

    Raises:
        ConfigError: the name is unknown (with the nearest known one), its extra is missing, or
            two distributions claim it.
    """
    plugin = BUILT_IN[kind].get(name)
    owners = _outside_owners(kind, name)
    if len(owners) + (plugin is not None) > 1:
        both = " and ".join([*owners, "this project"] if plugin else owners)
        raise ConfigError(path, f"{name!r} is registered by both {both}; uninstall one")
    if plugin is None:
        outside = _outside_names(kind)
        if name in outside:
            return None
        raise ConfigError(path, unknown_name(name, sorted({*BUILT_IN[kind], *outside})))
    if plugin.requires and not _installed(plugin.requires):
        raise ConfigError(
            path,
            f"{name} needs the extra: pip install 'rlhf-pipeline[{plugin.extra}]' "
            f"(no module named {plugin.requires})",
        )
    return plugin


def _outside_names(kind: PluginKind) -> list[str]:
    prefix = f"{kind}."
    return [
        entry.name.removeprefix(prefix)
        for entry in entry_points(group=ENTRY_POINT_GROUP)
        if entry.name.startswith(prefix)
    ]


def _outside_owners(kind: PluginKind, name: str) -> list[str]:
    """The distributions that bring a plugin of that name, as `name==version`."""
    found = entry_points(group=ENTRY_POINT_GROUP, name=f"{kind}.{name}")
    return sorted(
        f"{entry.dist.name}=={entry.dist.version}" if entry.dist else entry.value for entry in found
    )


@cache
def _installed(module: str) -> bool:
    """Whether a top-level module of another distribution can be found; imports nothing."""
    return importlib.util.find_spec(module) is not None
