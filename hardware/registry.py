"""Platforms by name, and the one place that chooses among them.

The order of decision: `RLHF_PLATFORM`, then the setting, then (`auto`) a probe of every
registered accelerator in the order of registration, then the CPU. The answer always says why.
Promises: a platform asked for by name and not available is an error, never another platform;
a name registered twice is an error.
Other distributions register through the entry-point group `rlhf.plugins`, as ``platform.<name>``.
"""

import importlib
from importlib.metadata import entry_points

from hardware.base import Availability, PlatformBase
from infra import env
from infra.errors import ConfigError
from infra.names import unknown_name

_SETTING = "hardware.platform"
_ENTRY_POINT_GROUP = "rlhf.plugins"
_ENTRY_POINT_PREFIX = "platform."


class PlatformRegistry:
    """Names of platforms and where their classes are; a class is imported when it is asked for.

    Args:
        load_entry_points: also register what other installed distributions announce.
    """

    def __init__(self, *, load_entry_points: bool = False) -> None:
        self._targets: dict[str, str] = {}
        if load_entry_points:
            for entry in entry_points(group=_ENTRY_POINT_GROUP):
                if entry.name.startswith(_ENTRY_POINT_PREFIX):
                    self.register(entry.name.removeprefix(_ENTRY_POINT_PREFIX), entry.value)

    def register(self, name: str, target: str) -> None:
        """Announce a platform.

        Args:
            name: what the setting `hardware.platform` calls it.
            target: its class as ``module:Class``.

        Raises:
            ConfigError: the name is taken.
        """
        taken = self._targets.get(name)
        if taken is not None:
            raise ConfigError(
                _SETTING, f"{name!r} is registered by both {taken} and {target}; uninstall one"
            )
        self._targets[name] = target

    def names(self) -> list[str]:
        """Registered names, in the order of probing (the CPU is always probed last)."""
        return sorted(self._targets, key=lambda name: name == "cpu")

    def create(self, name: str) -> PlatformBase:
        """Import a platform's class and make the platform.

        Args:
            name: a registered name.

        Returns:
            The platform; whether it is available is not looked at.

        Raises:
            ConfigError: nobody registered the name.
        """
        target = self._targets.get(name)
        if target is None:
            raise ConfigError(_SETTING, unknown_name(name, ["auto", *self.names()]))
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)()

    def availability(self, name: str) -> Availability:
        """Whether a registered platform can be used here; a plugin that fails to import cannot."""
        try:
            return self.create(name).is_available()
        except ImportError as error:
            return Availability(False, f"cannot be imported: {error}")

    def detect(self, requested: str = "auto") -> tuple[PlatformBase, str]:
        """Choose the platform of this process.

        Args:
            requested: a name, or `auto` to probe.

        Returns:
            The platform, and one line that says why it was chosen.

        Raises:
            ConfigError: the name is unknown, or that platform is not available here.
        """
        override = env.RLHF_PLATFORM.get()
        source = "RLHF_PLATFORM" if override else _SETTING
        wanted = override or requested
        if wanted != "auto":
            return self._exactly(wanted, source)
        refused: list[str] = []
        for name in self.names():
            found = self.availability(name)
            if found.ok:
                why_not = f" ({'; '.join(refused)})" if refused else ""
                return self.create(name), f"{name}: {found.reason}{why_not}"
            refused.append(f"not {name}: {found.reason}")
        raise ConfigError(_SETTING, f"nothing to run on: {'; '.join(refused)}")

    def _exactly(self, name: str, source: str) -> tuple[PlatformBase, str]:
        platform_name = _DEVICE_NAMES.get(name, name)
        self.create(platform_name)
        found = self.availability(platform_name)
        if found.ok:
            return self.create(platform_name), f"{name}: asked for by {source}; {found.reason}"
        usable = [other for other in self.names() if self.availability(other).ok]
        raise ConfigError(
            _SETTING,
            f"{name} asked, not available ({found.reason}); use {' or '.join(usable)}, "
            f"or install a torch built for it (asked for by {source})",
        )


_DEVICE_NAMES = {"cuda": "nvidia"}
"""Device types that users write where a vendor is meant."""


def built_in_registry() -> PlatformRegistry:
    """A registry of this project's platforms and those of installed plugins."""
    registry = PlatformRegistry(load_entry_points=True)
    registry.register("nvidia", "hardware.nvidia:NvidiaPlatform")
    registry.register("cpu", "hardware.cpu:CPUPlatform")
    return registry


def detect(requested: str = "auto") -> tuple[PlatformBase, str]:
    """`PlatformRegistry.detect` over this project's platforms and installed plugins."""
    return built_in_registry().detect(requested)


def names() -> list[str]:
    """Names of all registered platforms."""
    return built_in_registry().names()
