"""Plugins of other people: who announces what, under which name.

Two ways lead here: an installed distribution's entry points of the group `rlhf.plugins`, named
``<kind>.<name>``, and the modules listed in RLHF_USE_EXTERNAL_MODULES, which call a registration
function when they are imported. One plugin may come by both.
Promises: listing imports no plugin, only the listed modules; whatever a plugin raises while it
is loaded becomes one line that names its owner and the reason. A listed module that cannot be
imported costs only whoever asks for what it would have registered; what it registered before it
failed stays.
Does not promise that a name has one owner: whoever is asked for the name refuses a second one,
so that a clash costs nobody else anything.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from infra import env
from infra.errors import EXIT_TERMINATED, ConfigError
from infra.names import unknown_name
from infra.redact import redact

ENTRY_POINT_GROUP = "rlhf.plugins"
RUN_TIME_OWNER = "registered at run time"


@dataclass(frozen=True)
class OutsidePlugin:
    """One announcement.

    Attributes:
        kind: `platform`, `backend`, `rollout`, `reward`, `adv_estimator`, ...
        name: what the configuration calls it.
        target: ``module:attribute``.
        owner: `distribution==version`, or `RUN_TIME_OWNER`.
        devices: torch device types that a training engine runs on; empty means any.
        vendor: of those devices; None serves every vendor.
    """

    kind: str
    name: str
    target: str
    owner: str
    devices: tuple[str, ...] = ()
    vendor: str | None = None

    @property
    def module(self) -> str:
        """The module part of `target`."""
        return self.target.partition(":")[0]

    @property
    def source(self) -> str:
        """Who to turn to about it, in an error line."""
        return f"{self.target} ({self.owner})" if self.owner == RUN_TIME_OWNER else self.owner

    @property
    def extends(self) -> bool:
        """Whether it only adds a device or a vendor to a name that may exist."""
        return bool(self.devices) or self.vendor is not None

    def collides_with(self, other: "OutsidePlugin") -> bool:
        """Whether both claim one name for one place."""
        if (self.kind, self.name, self.vendor) != (other.kind, other.name, other.vendor):
            return False
        return self.devices == other.devices or bool({*self.devices} & {*other.devices})


@dataclass(frozen=True)
class BrokenModule:
    """A module of RLHF_USE_EXTERNAL_MODULES that cannot be imported.

    Attributes:
        name: as it is listed.
        reason: what it raised, in one line, without secrets.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return (
            f"environment.{env.RLHF_USE_EXTERNAL_MODULES.name}: {self.name} cannot be imported "
            f"({self.reason}); repair or install it, or remove it from the list"
        )


_registered: list[OutsidePlugin] = []
_broken: dict[str, BrokenModule] = {}
"""What failed once is not tried again: it may have done half of its work."""


def register_outside(
    kind: str,
    name: str,
    target: str,
    *,
    devices: Sequence[str] = (),
    vendor: str | None = None,
) -> None:
    """Announce a plugin for this process; the same announcement again changes nothing.

    A name that is taken is not refused here but where it is asked for, as that of a distribution.

    Args:
        kind: of the plugin.
        name: what the configuration calls it.
        target: ``module:attribute``, imported when it is asked for.
        devices: torch device types of a training engine; empty means any.
        vendor: of those devices; None serves every vendor.

    Raises:
        ConfigError: `target` is none; devices of something that is no training engine, or a
            vendor of none.
    """
    path = f"plugin {kind}.{name}"
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise ConfigError(path, f"got target {target!r}; need module:attribute")
    if devices and kind != "backend":
        raise ConfigError(path, "got devices; only a backend has them; remove them")
    if vendor is not None and not devices:
        raise ConfigError(path, f"got vendor {vendor!r} without devices; name its devices")
    places = tuple(sorted(set(devices)))
    plugin = OutsidePlugin(kind, name, target, RUN_TIME_OWNER, places, vendor)
    if plugin not in _registered:
        _registered.append(plugin)


def outside_plugins(kind: str | None = None) -> tuple[OutsidePlugin, ...]:
    """Every plugin that is not this project's.

    Args:
        kind: only of this kind; None lists all.

    Returns:
        Those of distributions by name, then those registered at run time in their order; what
        came by both ways stands among the first.
    """
    import_external_modules()
    announced = _announced()
    new = [
        plugin
        for plugin in _registered
        if not any(plugin.collides_with(o) and plugin.target == o.target for o in announced)
    ]
    return tuple(p for p in (*announced, *new) if kind is None or p.kind == kind)


def external_module_names() -> tuple[str, ...]:
    """What RLHF_USE_EXTERNAL_MODULES lists, in its order."""
    listed = env.RLHF_USE_EXTERNAL_MODULES.get() or ""
    return tuple(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))


def import_external_modules() -> tuple[BrokenModule, ...]:
    """Import what RLHF_USE_EXTERNAL_MODULES names, in its order.

    Returns:
        Those that cannot be imported. Whoever starts something says so: they may have been meant
        to change what it does.
    """
    names = external_module_names()
    for name in names:
        if name in _broken:
            continue
        try:
            _import(name)
        except Exception as error:  # noqa: BLE001  plugin boundary: any reason is the user's answer
            _broken[name] = BrokenModule(name, redact(reason_of(error)))
    return tuple(_broken[name] for name in names if name in _broken)


def unknown_plugin(name: str, known: Iterable[str]) -> str:
    """Text of the error about a name that nobody announced.

    Args:
        name: what the user wrote.
        known: names that would work, in the order to show them.

    Returns:
        `infra.names.unknown_name`, and which modules might have registered it.
    """
    broken = (f"; {module}" for module in import_external_modules())
    return unknown_name(name, known) + "".join(broken)


def load_outside(plugin: OutsidePlugin, path: str) -> Any:
    """Import a plugin's module and take what it announces from it.

    Args:
        plugin: of `outside_plugins`.
        path: the setting that asked for it, for the error line.

    Returns:
        The attribute that `target` names.

    Raises:
        ConfigError: its module is missing or raises, or has no such attribute.
    """
    attribute = plugin.target.partition(":")[2]
    try:
        return getattr(_import(plugin.module), attribute)
    except Exception as error:  # noqa: BLE001  plugin boundary: any reason is the user's answer
        raise ConfigError(
            path,
            f"{plugin.name} cannot be loaded from {plugin.target} ({reason_of(error)}); repair or "
            f"remove {plugin.source}",
        ) from error


def _import(name: str) -> ModuleType:
    """Import other people's module; that it calls `sys.exit` is an error like any other."""
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        if error.code == EXIT_TERMINATED:
            raise  # not the module: this process was told to end
        raise ImportError(f"it calls sys.exit({error.code!r})") from error


def reason_of(error: BaseException) -> str:
    """An exception of unknown make as one line: its kind and what it says."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _announced() -> tuple[OutsidePlugin, ...]:
    """Entry points of installed distributions, sorted: their order depends on the machine."""
    found = {_of_entry_point(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted(found, key=lambda plugin: (plugin.kind, plugin.name, plugin.owner)))


def _of_entry_point(entry: EntryPoint) -> OutsidePlugin:
    kind, _, name = entry.name.partition(".")
    owner = f"{entry.dist.name}=={entry.dist.version}" if entry.dist else entry.value
    return OutsidePlugin(kind, name, entry.value, owner)
