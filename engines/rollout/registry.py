"""Rollout engines by name; a name's module is imported when it is asked for.

Promises: built-in names come from `engines.config.plugins`, other people's from `infra.plugins`
(entry points ``rollout.<name>``, `register_plugin`); an unknown name is an error that lists the
known ones and the nearest.
To add an engine: a class with the constructor of `TransformersEngine`, and a row of that table or
one of those announcements.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from engines.config.plugins import BUILT_IN, check_plugin
from engines.config.rollout import RolloutConfig
from engines.rollout.base import RolloutEngine
from hardware.base import PlatformBase
from infra.plugins import load_outside, outside_plugins

_SETTING = "rollout.engine"


def names() -> list[str]:
    """Every engine that can be named, other people's included."""
    return sorted({*BUILT_IN["rollout"], *(plugin.name for plugin in outside_plugins("rollout"))})


def load(name: str) -> Callable[..., RolloutEngine]:
    """Import the class behind a name.

    Args:
        name: value of the setting `rollout.engine`.

    Returns:
        The class; its constructor takes what `create_rollout_engine` does, without the name.

    Raises:
        ConfigError: nobody announced that name, or two did, or other people's does not load.
    """
    plugin = check_plugin("rollout", name, _SETTING)
    if plugin is None:
        outside = next(o for o in outside_plugins("rollout") if o.name == name)
        return load_outside(outside, _SETTING)
    module, _, attribute = plugin.target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def create_rollout_engine(
    name: str, hf_dir: Path, rollout: RolloutConfig, dtype: str, platform: PlatformBase
) -> RolloutEngine:
    """Build a rollout engine. It serves nothing before its first weight update.

    Args:
        name: name in the registry.
        hf_dir: model directory.
        rollout: capacity, deadline and options.
        dtype: `float32` or `bfloat16`.
        platform: where it runs.

    Returns:
        The engine, without weights.

    Raises:
        ConfigError: `load` refuses the name, or the engine cannot serve that model or those
            options.
    """
    return load(name)(hf_dir, rollout, dtype, platform)
