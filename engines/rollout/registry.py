"""Rollout engines by name; a name's module is imported when it is asked for.

Promises: built-in names come from `engines.config.plugins`, other people's from `infra.plugins`
(entry points ``rollout.<name>``, `register_plugin`), a program's own from `register`; an unknown
name is an error that lists the known ones and the nearest.
To add an engine: a class with the constructor of `TransformersEngine`, and one of the three.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from engines.config.plugins import BUILT_IN
from engines.config.rollout import RolloutConfig
from engines.errors import UnknownPluginError
from engines.rollout.base import RolloutEngine
from hardware.base import PlatformBase
from infra.names import unknown_name
from infra.plugins import load_outside, outside_plugins


class RolloutRegistry:
    """The rollout engines that can be named."""

    _registered: dict[str, str] = {}

    @classmethod
    def register(cls, name: str, target: str) -> None:
        """Make a class known as `name`.

        Args:
            name: what the setting `rollout.engine` calls it.
            target: ``module:Class``.

        Raises:
            ValueError: the name is taken by another target, or `target` has no colon.
        """
        if ":" not in target:
            raise ValueError(f"target {target!r}: need module:Class")
        if cls.targets().get(name, target) != target:
            raise ValueError(f"rollout engine {name!r} is already {cls.targets()[name]}")
        cls._registered[name] = target

    @classmethod
    def targets(cls) -> dict[str, str]:
        """Name to ``module:Class`` of every known engine."""
        outside = {plugin.name: plugin.target for plugin in outside_plugins("rollout")}
        built_in = {name: plugin.target for name, plugin in BUILT_IN["rollout"].items()}
        return {**outside, **cls._registered, **built_in}

    @classmethod
    def load(cls, name: str) -> Callable[..., RolloutEngine]:
        """Import the class behind a name.

        Args:
            name: name in the registry.

        Returns:
            The class; its constructor takes what `create_rollout_engine` does, without the name.

        Raises:
            UnknownPluginError: nobody registered that name.
            ConfigError: it is other people's, and does not load.
        """
        targets = cls.targets()
        if name not in targets:
            raise UnknownPluginError("rollout.engine", unknown_name(name, sorted(targets)))
        for plugin in outside_plugins("rollout"):
            if (plugin.name, plugin.target) == (name, targets[name]):
                return load_outside(plugin, "rollout.engine")
        module, _, attribute = targets[name].partition(":")
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
        UnknownPluginError: nobody registered that name.
        ConfigError: the engine cannot serve that model or those options.
    """
    return RolloutRegistry.load(name)(hf_dir, rollout, dtype, platform)
