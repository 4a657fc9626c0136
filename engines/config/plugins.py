"""The built-in plugins by name, readable without importing any of them.

Each name leads to its class or function as ``module:attribute`` and, where the plugin stands on
a library of an optional extra, to that library. The registries of the engine floor load from
here; the control plane checks names and extras here, long before a job starts.

Does not list plugins of other people: those announce themselves as entry points of the group
`rlhf.plugins`, named ``<kind>.<name>`` (``rollout.mine = my_package.engine:MyEngine``), or by
`register_plugin` from a module that RLHF_USE_EXTERNAL_MODULES lists.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal

from engines.config.backends import BACKENDS, job_interpreter
from engines.errors import UnknownPluginError
from infra.errors import ConfigError
from infra.plugins import (
    ENTRY_POINT_GROUP,
    OutsidePlugin,
    outside_plugins,
    register_outside,
    unknown_plugin,
)

PluginKind = Literal["backend", "rollout", "adv_estimator", "loss_mode", "kl_loss_type", "reward"]

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Plugin",
    "PluginKind",
    "check_plugin",
    "refuse_two_owners",
    "register_plugin",
]


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
        name: Plugin(backend.language_model, backend.requires, backend.extra)
        for name, backend in BACKENDS.items()
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

_OTHER_FORMS: Mapping[PluginKind, tuple[str, ...]] = {"reward": ("path/to/file.py:name",)}
"""What a setting takes beside names; for error lines."""


def register_plugin(
    kind: PluginKind,
    name: str,
    target: str,
    *,
    devices: Sequence[str] = (),
    vendor: str | None = None,
) -> None:
    """Make a plugin known to this process; for modules of RLHF_USE_EXTERNAL_MODULES.

    The control plane imports those modules too: they may import this module, not torch.

    Args:
        kind: which table the name belongs to.
        name: what the configuration calls it; a backend's value model is ``<name>.value_model``.
        target: ``module:attribute``, imported when it is asked for.
        devices: torch device types of a training engine; empty means any. An engine for one
            device or vendor may add itself to the name of a built-in backend.
        vendor: of those devices; None serves every vendor.

    Raises:
        ConfigError: `target` is no ``module:attribute``, devices of something that is no training
            engine, or a vendor of none. A name that is taken is refused when it is asked for.
    """
    register_outside(kind, name, target, devices=devices, vendor=vendor)


def check_plugin(kind: PluginKind, name: str, path: str) -> Plugin | None:
    """Say whether a plugin can be used, without importing it.

    Args:
        kind: which table the name belongs to.
        name: the name in the configuration.
        path: where the name stands in the configuration, for the error line.

    Returns:
        The built-in plugin, or None when someone else brings it.

    Raises:
        UnknownPluginError: nobody brings it; names the nearest known one.
        ConfigError: its extra or its job environment is missing, or two claim it.
    """
    refuse_two_owners(kind, name, path)
    plugin = BUILT_IN[kind].get(name)
    if plugin is None:
        # `mine.value_model` is an engine of the backend `mine`.
        outside = [o.name for o in outside_plugins(kind)]
        names = {n.partition(".")[0] for n in outside} if kind == "backend" else {*outside}
        if name in names:
            return None
        known = [*sorted({*BUILT_IN[kind], *names}), *_OTHER_FORMS.get(kind, ())]
        raise UnknownPluginError(path, unknown_plugin(name, known))
    if kind == "backend" and job_interpreter(name, path) is not None:
        return plugin
    if plugin.requires and not _installed(plugin.requires):
        raise ConfigError(
            path,
            f"{name} needs the extra: pip install 'rlhf-pipeline[{plugin.extra}]' "
            f"(no module named {plugin.requires})",
        )
    return plugin


def refuse_two_owners(kind: PluginKind, name: str, path: str) -> None:
    """Refuse a name that two claim for one place, by whichever way they announced it.

    Args:
        kind: which table the name belongs to.
        name: as it is announced: an engine for values is ``<backend>.value_model``.
        path: where the name stands in the configuration, for the error line.

    Raises:
        ConfigError: names both.
    """
    claims = [o for o in outside_plugins(kind) if o.name == name]
    both = [
        *(f"{a.source} and {b.source}" for a, b in combinations(claims, 2) if a.collides_with(b)),
        *(f"{o.source} and this project" for o in claims if _is_ours(kind, o)),
    ]
    if both:
        raise ConfigError(path, f"{name!r} is registered by both {both[0]}; remove one")


def _is_ours(kind: PluginKind, plugin: OutsidePlugin) -> bool:
    """Whether this project has something in that place."""
    if kind != "backend":
        return plugin.name in BUILT_IN[kind]
    name, _, model_type = plugin.name.partition(".")
    backend = BACKENDS.get(name)
    if backend is None or (model_type or "language_model") not in backend.targets:
        return False
    shared = backend.devices.keys() & plugin.devices
    return not plugin.extends or (plugin.vendor is None and bool(shared))


@cache
def _installed(module: str) -> bool:
    """Whether a top-level module of another distribution can be found; imports nothing."""
    return importlib.util.find_spec(module) is not None
