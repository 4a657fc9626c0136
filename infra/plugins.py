"""Rows of the plugin tables, and where other people's come from.

A row says where a part is and what the plan must know of it without importing it. This project's
rows stand in its tables (`infra.plugin_table`). Two ways lead other people's here: entry points
of the group `rlhf.plugins` of an installed distribution, and `register_row`, called by a module
while it is imported. An entry point ``<kind>.<name> = module:attribute`` is a row without facts;
``module.<any> = module`` names a module to import, as RLHF_USE_EXTERNAL_MODULES does.
Promises: listing imports no part, only those modules; whatever a part raises while it is loaded
becomes one line that names its owner and the reason. A module that cannot be imported costs only
whoever asks for what it would have registered; what it registered before it failed stays.
Does not promise that a name has one owner: the table that is asked for it refuses a second one,
so that a clash costs nobody else anything.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from infra import env
from infra.errors import EXIT_TERMINATED, ConfigError
from infra.names import unknown_name
from infra.redact import redact

ENTRY_POINT_GROUP = "rlhf.plugins"
MODULE_KIND = "module"
THIS_PROJECT = "this project"
RUN_TIME_OWNER = "registered at run time"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One part of one kind.

    Attributes:
        name: what the configuration calls it.
        target: ``module:attribute``.
        requires: importable module that an extra or a job environment brings.
        extra: name of that extra.
        environment: name of the job environment (`make env-<name>`) that it runs in, if not the
            project's own.
        options: ``module:Class``, the pydantic schema of its options, importable without torch.
            None: this project's part has none; another's are not looked at before it runs.
        devices: torch device types that a training engine runs on; empty means any.
        vendor: of those devices; None serves every vendor.
        owner: `THIS_PROJECT`, `distribution==version` or `RUN_TIME_OWNER`.
        registrar: module whose import made the row known; None: a table or an entry point.
    """

    name: str
    target: str
    requires: str | None = None
    extra: str | None = None
    environment: str | None = None
    options: str | None = None
    devices: tuple[str, ...] = ()
    vendor: str | None = None
    owner: str = field(default=THIS_PROJECT, repr=False)
    registrar: str | None = field(default=None, repr=False)

    @property
    def module(self) -> str:
        """The module part of `target`."""
        return self.target.partition(":")[0]

    @property
    def modules(self) -> frozenset[str]:
        """Those whose code the part is: its own, another's options, and what made it known."""
        options = None if self.is_ours or not self.options else self.options.partition(":")[0]
        return frozenset({self.module, options, self.registrar} - {None})

    @property
    def counted(self) -> str:
        """What of the row can change a number, as a text; sources and options count elsewhere."""
        return self.target

    @property
    def is_ours(self) -> bool:
        """Whether it is this project's."""
        return self.owner == THIS_PROJECT

    @property
    def source(self) -> str:
        """Who to turn to about it, in an error line."""
        return f"{self.target} ({self.owner})" if self.owner == RUN_TIME_OWNER else self.owner

    def collides_with(self, other: "Row") -> bool:
        """Whether both claim one name for one place; what is ours is ours on any device."""
        if (self.name, self.vendor) != (other.name, other.vendor):
            return False
        if (self.is_ours or other.is_ours) and not (self.devices and other.devices):
            return True
        return self.devices == other.devices or bool({*self.devices} & {*other.devices})


@dataclass(frozen=True)
class BrokenModule:
    """A module that should have registered something and cannot be imported.

    Attributes:
        name: as it is listed.
        reason: what it raised, in one line, without secrets.
        owner: who lists it: a distribution, or the environment variable.
    """

    name: str
    reason: str
    owner: str

    def __str__(self) -> str:
        return (
            f"{self.owner}: {self.name} cannot be imported "
            f"({self.reason}); repair or install it, or remove it from the list"
        )


_registered: list[tuple[str, Row]] = []
_broken: dict[str, BrokenModule] = {}
"""What failed once is not tried again: it may have done half of its work."""
_importing: list[tuple[str, str]] = []
"""(module, owner of its rows) of what is being imported, the innermost last."""


def register_row(kind: str, row: Row) -> None:
    """Make a row known to this process; the same row again changes nothing.

    A name that is taken is not refused here but where it is asked for, as that of a distribution.

    Args:
        kind: of the table.
        row: its owner is filled in.

    Raises:
        ConfigError: its target is no ``module:attribute``; devices of something that is no
            training engine, or a vendor of none.
    """
    path = f"plugin {kind}.{row.name}"
    module, _, attribute = row.target.partition(":")
    if not module or not attribute:
        raise ConfigError(path, f"got target {row.target!r}; need module:attribute")
    if row.devices and kind != "backend":
        raise ConfigError(path, "got devices; only a backend has them; remove them")
    if row.vendor is not None and not row.devices:
        raise ConfigError(path, f"got vendor {row.vendor!r} without devices; name its devices")
    registrar, owner = _importing[-1] if _importing else (None, RUN_TIME_OWNER)
    places = tuple(sorted(set(row.devices)))
    known = replace(row, devices=places, owner=owner, registrar=registrar)
    if (kind, known) not in _registered:
        _registered.append((kind, known))


def outside_rows() -> tuple[tuple[str, Row], ...]:
    """Every (kind, row) that is not this project's.

    Returns:
        Those of distributions by kind and name, then those registered at run time in their order;
        what came by both ways stands among the first.
    """
    import_external_modules()
    announced = [_of_entry_point(entry) for entry in _entries() if not _names_module(entry)]
    new = [
        (kind, row)
        for kind, row in _registered
        if not any(
            kind == other_kind and row.collides_with(o) and row.target == o.target
            for other_kind, o in announced
        )
    ]
    return (*announced, *new)


def outside_plugins(kind: str) -> tuple[Row, ...]:
    """The `outside_rows` of one kind."""
    return tuple(row for of_kind, row in outside_rows() if of_kind == kind)


def external_modules() -> dict[str, str]:
    """Modules that register rows when they are imported, with who lists each, in their order."""
    installed = {entry.value: _owner(entry) for entry in _entries() if _names_module(entry)}
    listed = env.RLHF_USE_EXTERNAL_MODULES.get() or ""
    variable = f"environment.{env.RLHF_USE_EXTERNAL_MODULES.name}"
    asked = {name.strip(): variable for name in listed.split(",") if name.strip()}
    return {**asked, **installed}


def import_external_modules() -> tuple[BrokenModule, ...]:
    """Import the `external_modules`. No torch: the control plane does so too.

    A job and each rank of its group call this first, so that a module which changes something
    else on import (a library's patch) does so before that library is used.

    Returns:
        Those that cannot be imported. Whoever starts something says so: they may have been meant
        to change what it does.
    """
    modules = external_modules()
    for name, owner in modules.items():
        if name in _broken:
            continue
        by_variable = owner.startswith("environment.")
        _importing.append((name, RUN_TIME_OWNER if by_variable else owner))
        try:
            _import(name)
        except Exception as error:  # noqa: BLE001  plugin boundary: any reason is the user's answer
            _broken[name] = BrokenModule(name, redact(reason_of(error)), owner)
        finally:
            _importing.pop()
    return tuple(_broken[name] for name in modules if name in _broken)


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


def load_target(target: str) -> Any:
    """Import a module and take an attribute from it.

    Args:
        target: ``module:attribute``.

    Returns:
        The attribute.
    """
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_row(row: Row, path: str) -> Any:
    """Import the part that a row stands for.

    Args:
        row: of a table.
        path: the setting that asked for it, for the error line.

    Returns:
        The attribute that `target` names.

    Raises:
        ConfigError: another's module is missing or raises, or has no such attribute; a library
            that this project's part stands on is missing or broken.
    """
    if row.is_ours and not row.requires:
        return load_target(row.target)
    try:
        _import(row.module)
        return load_target(row.target)
    except Exception as error:
        if row.is_ours and not isinstance(error, ImportError):
            raise
        remedy = f"pip install 'rlhf-pipeline[{row.extra}]'" if row.extra else "install it again"
        raise ConfigError(
            path,
            f"{row.name} cannot be loaded from {row.target} ({reason_of(error)}); "
            + (remedy if row.is_ours else f"repair or remove {row.source}"),
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


def _entries() -> list[EntryPoint]:
    """Entry points of installed distributions, sorted: their order depends on the machine."""
    found = {(entry.name, _owner(entry), entry.value): entry for entry in _group()}
    return [found[key] for key in sorted(found)]


def _group() -> Iterable[EntryPoint]:
    return _found_by(entry_points, tuple((place, _changed_at(place)) for place in sys.path))


def _changed_at(place: str) -> int:
    try:
        return os.stat(place).st_mtime_ns
    except OSError:
        return 0


@cache
def _found_by(
    scan: Callable[..., Iterable[EntryPoint]],
    places: tuple[tuple[str, int], ...],  # noqa: ARG001  where it looks, and their times of change
) -> tuple[EntryPoint, ...]:
    """Our group, read once: a scan opens the metadata of every distribution (0.2 s)."""
    return tuple(scan(group=ENTRY_POINT_GROUP))


def _names_module(entry: EntryPoint) -> bool:
    return entry.name.partition(".")[0] == MODULE_KIND


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name}=={entry.dist.version}" if entry.dist else entry.value


def _of_entry_point(entry: EntryPoint) -> tuple[str, Row]:
    kind, _, name = entry.name.partition(".")
    return kind, Row(name=name, target=entry.value, owner=_owner(entry))
