"""The built-in plugins by name, readable without importing any of them.

Each name leads to its class or function as ``module:attribute`` and, where the plugin stands on
a library of an optional extra, to that library. The registries of the engine floor load from
here; the control plane checks names and extras here, long before a job starts.

Does not list plugins of other distributions: those announce themselves as entry points of the
group `rlhf.plugins`, named ``<kind>.<name>`` (``rollout.mine = my_package.engine:MyEngine``).
"""

import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from infra.errors import ConfigError

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
        "megatron": Plugin(
            "engines.training.megatron.engine:MegatronEngine", "mbridge", "megatron"
        ),
    },
    "rollout": {
        "transformers": Plugin("engines.rollout.transformers_engine:TransformersEngine"),
        "vllm": Plugin("engines.rollout.vllm:VLLMEngine", "vllm", "vllm"),
        "sglang": Plugin("engines.rollout.sglang:SGLangEngine", "sglang", "sglang"),
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
        ConfigError: the name is unknown (with the nearest known one), or its extra is missing.
    """
    plugin = BUILT_IN[kind].get(name)
    if plugin is None:
        outside = _outside_names(kind)
        if name in outside:
            return None
        raise ConfigError(path, _unknown(kind, name, outside))
    if plugin.requires and not _installed(plugin.requires):
        raise ConfigError(
            path,
            f"{name} needs the extra: pip install 'rlhf-pipeline[{plugin.extra}]' "
            f"(no module named {plugin.requires})",
        )
    if not _usable(plugin):
        raise ConfigError(path, _unknown(kind, name, _outside_names(kind)))
    return plugin


def usable_names(kind: PluginKind) -> list[str]:
    """Built-in names of a kind that this installation could run, extras included."""
    return [name for name, plugin in BUILT_IN[kind].items() if _usable(plugin)]


def unknown_name(name: str, known: Sequence[str], unusable: Sequence[str] = ()) -> str:
    """Text of the error about a name nobody registered: what exists, and the nearest name.

    Args:
        name: what the user wrote.
        known: names that would work.
        unusable: names that exist but need an extra; they may still be what was meant.

    Returns:
        The problem part of the error line.
    """
    others = [other for other in (*known, *unusable) if other != name]
    nearest = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"no {name!r}; known: {', '.join(sorted(known)) or 'none'}{hint}"


def _unknown(kind: PluginKind, name: str, outside: Sequence[str]) -> str:
    return unknown_name(name, [*usable_names(kind), *outside], list(BUILT_IN[kind]))


def _outside_names(kind: PluginKind) -> list[str]:
    prefix = f"{kind}."
    return [
        entry.name.removeprefix(prefix)
        for entry in entry_points(group=ENTRY_POINT_GROUP)
        if entry.name.startswith(prefix)
    ]


def _usable(plugin: Plugin) -> bool:
    """Whether the adapter of a plugin that stands on an extra is part of this installation."""
    return plugin.requires is None or _shipped(plugin.module)


@cache
def _installed(module: str) -> bool:
    """Whether a top-level module of another distribution can be found; imports nothing."""
    return importlib.util.find_spec(module) is not None


@cache
def _shipped(module: str) -> bool:
    """Whether this installation holds a module of ours.

    Looks for the file: `find_spec` would import the parent packages, and with them torch.
    """
    parts = module.split(".")[1:]
    path = Path(__file__).parents[1].joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
