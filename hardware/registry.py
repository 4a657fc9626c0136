"""Platforms by name, and the one place that chooses among them.

The order of decision: `RLHF_PLATFORM`, then the setting, then (`auto`) a probe: platforms of
other people first (a vendor's own package knows its device better than the lookalike here), then
nvidia, amd, huawei, intel, cambricon, metax, and the CPU last. The answer always says why.
Promises: a platform asked for by name and not available is an error, never another platform; a
name with two owners is refused; a plugin that does not load costs one line and nobody else.
"""

import importlib
from collections.abc import Mapping

from hardware.base import Availability, PlatformBase
from infra import env
from infra.errors import ConfigError
from infra.plugins import (
    OutsidePlugin,
    import_external_modules,
    load_outside,
    outside_plugins,
    reason_of,
    register_outside,
    unknown_plugin,
)

_SETTING = "hardware.platform"
_KIND = "platform"

BUILT_IN: Mapping[str, str] = {
    "nvidia": "hardware.nvidia:NvidiaPlatform",
    "amd": "hardware.amd:AMDPlatform",
    "huawei": "hardware.huawei:HuaweiPlatform",
    "intel": "hardware.intel:IntelPlatform",
    "cambricon": "hardware.cambricon:CambriconPlatform",
    "metax": "hardware.metax:MetaXPlatform",
    "cpu": "hardware.cpu:CPUPlatform",
}
"""This project's platforms, in the order of probing."""

_DEVICE_TYPES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("nvidia", "amd", "metax"),
    "rocm": ("amd",),
    "npu": ("huawei",),
    "xpu": ("intel",),
    "mlu": ("cambricon",),
}
"""Device types that users write where a vendor is meant."""


class PlatformRegistry:
    """Names of platforms and where their classes are; a class is imported when it is asked for."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        self._outside: dict[str, OutsidePlugin] = {}
        self._clashes: dict[str, ConfigError] = {}

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
                _SETTING, f"{name!r} is registered by both {taken} and {target}; remove one"
            )
        self._targets[name] = target

    def register_plugin(self, plugin: OutsidePlugin) -> None:
        """Announce a platform of other people; a taken name is refused when it is asked for.

        Args:
            plugin: of the kind `platform`.
        """
        name, other = plugin.name, self._outside.get(plugin.name)
        taken = other.source if other else "this project" if name in self._targets else None
        if taken is not None:
            self._clashes[name] = ConfigError(
                _SETTING,
                f"{name!r} is registered by both {taken} and {plugin.source}; remove one",
            )
            return
        self._targets[name] = plugin.target
        self._outside[name] = plugin

    def names(self) -> list[str]:
        """Registered names, in the order of probing: other people's first, the CPU last."""
        return sorted(self._targets, key=lambda name: (name == "cpu", name not in self._outside))

    def create(self, name: str) -> PlatformBase:
        """Import a platform's class and make the platform.

        Args:
            name: a registered name.

        Returns:
            The platform; whether it is available is not looked at.

        Raises:
            ConfigError: nobody registered the name, or two did, or its plugin does not load.
        """
        if name in self._clashes:
            raise self._clashes[name]
        target = self._targets.get(name)
        if target is None:
            raise ConfigError(_SETTING, unknown_plugin(name, ["auto", *self.names()]))
        plugin = self._outside.get(name)
        if plugin is not None:
            found = load_outside(plugin, _SETTING)
            try:
                return found()
            except Exception as error:  # noqa: BLE001  plugin boundary
                raise ConfigError(
                    _SETTING, f"{name} of {plugin.source} does not start ({reason_of(error)})"
                ) from error
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)()

    def availability(self, name: str) -> Availability:
        """Whether a registered platform can be used here; a plugin that does not load cannot.

        Args:
            name: a registered name.

        Returns:
            The platform's own answer, or why it could not be asked.
        """
        try:
            platform = self.create(name)
        except ConfigError as error:
            return Availability(False, error.problem)
        except ImportError as error:
            return Availability(False, f"cannot be imported: {error}")
        try:
            return platform.is_available()
        except Exception as error:  # noqa: BLE001  plugin boundary: a probe must not raise
            if name not in self._outside:
                raise
            return Availability(False, f"its probe failed: {reason_of(error)}")

    def detect(self, requested: str = "auto") -> tuple[PlatformBase, str]:
        """Choose the platform of this process.

        Args:
            requested: a name, or `auto` to probe.

        Returns:
            The platform, and one line that says why it was chosen.

        Raises:
            ConfigError: the name is unknown, that platform is not available here, or (`auto`)
                a name has two owners.
        """
        override = env.RLHF_PLATFORM.get()
        source = "RLHF_PLATFORM" if override else _SETTING
        wanted = override or requested
        if wanted != "auto":
            return self._exactly(wanted, source)
        for clash in self._clashes.values():
            raise clash
        refused = {f"what {m.name} registers": m.reason for m in import_external_modules()}
        for name in self.names():
            found = self.availability(name)
            if found.ok:
                why_not = f" ({_not(refused)})" if refused else ""
                return self.create(name), f"{name}: {found.reason}{why_not}"
            refused[name] = found.reason
        raise ConfigError(_SETTING, f"nothing to run on: {_not(refused)}")

    def _exactly(self, name: str, source: str) -> tuple[PlatformBase, str]:
        known = name in self._targets or name in self._clashes
        candidates = (name,) if known else _DEVICE_TYPES.get(name, (name,))
        refused: dict[str, str] = {}
        for candidate in candidates:
            platform = self.create(candidate)
            found = self.availability(candidate)
            if found.ok:
                return platform, f"{candidate}: asked for by {source}; {found.reason}"
            refused[candidate] = found.reason
        usable = [other for other in self.names() if self.availability(other).ok]
        reasons = "; ".join(dict.fromkeys(refused.values()))
        raise ConfigError(
            _SETTING,
            f"{name} asked, not available ({reasons}); use {' or '.join(usable)}, "
            f"or install what it lacks (asked for by {source})",
        )


def built_in_registry() -> PlatformRegistry:
    """A registry of this project's platforms and those of other people."""
    registry = PlatformRegistry()
    for name, target in BUILT_IN.items():
        registry.register(name, target)
    for plugin in outside_plugins(_KIND):
        registry.register_plugin(plugin)
    return registry


def register_platform(name: str, target: str) -> None:
    """Make a platform known to this process; for modules of RLHF_USE_EXTERNAL_MODULES.

    Args:
        name: what the setting `hardware.platform` calls it.
        target: its class as ``module:Class``, imported when it is asked for.

    Raises:
        ConfigError: `target` is no ``module:Class``. A name that is taken is refused when it is
            asked for.
    """
    register_outside(_KIND, name, target)


def detect(requested: str = "auto") -> tuple[PlatformBase, str]:
    """`PlatformRegistry.detect` over this project's platforms and those of other people."""
    return built_in_registry().detect(requested)


def names() -> list[str]:
    """Names of all registered platforms."""
    return built_in_registry().names()


def _not(refused: Mapping[str, str]) -> str:
    """Why other platforms were passed over, those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"not {', '.join(group)}: {reason}" for reason, group in by_reason.items())
