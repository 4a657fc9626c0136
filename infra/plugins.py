"""Tables of plugins: one row per plugin of a kind, this project's and those of other packages.

A row says where a plugin is and what the planner must know about it without importing it. To add
one, write a file and a row in the table of its kind (`engines.config.plugins`,
`hardware.platforms`), or register it from another package: as an entry point of the group
`rlhf.plugins`, ``<kind>.<name> = module:attribute``, which is a row without further fields; or with
`register_row` in a module that is imported for it. Such modules are listed by entry points
``module.<any> = module`` and by RLHF_USE_EXTERNAL_MODULES.

Promises: `names` and `find` import no plugin, only the listed modules. Any exception during such an
import becomes one line with owner and reason, and affects only users of that module's rows; rows
registered before the failure stay. Errors have the same wording for every kind.
Does not promise: that a name has one owner, which `find_all` checks; or that a plugin and its
libraries can be imported, which `load` shows.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, TypeVar

from infra import env
from infra.errors import EXIT_TERMINATED, ConfigError, UnknownPluginError
from infra.job_environments import interpreter_of
from infra.names import unknown_name
from infra.redact import redact

ENTRY_POINT_GROUP = "rlhf.plugins"
MODULE_KIND = "module"
THIS_PROJECT = "this project"
RUN_TIME_OWNER = "registered at run time"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plugin of one kind.

    Attributes:
        target: ``module:attribute``.
        requires: importable module that the pip extra `extra` or `environment` provides.
        environment: job environment (`make env-<name>`) that it runs in; None: the project's own.
        options: ``module:Class``, the pydantic schema of its options, importable without torch.
            None: a plugin of this project has no options, those of an external one are not checked.
        devices: torch device types that a training engine supports; empty means any.
        vendor: vendor of those devices; None means every vendor.
        owner: `THIS_PROJECT`, `distribution==version` or `RUN_TIME_OWNER`.
        registrar: module that registered the row on import; None for a table or an entry point.
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
        """Module part of `target`."""
        return self.target.partition(":")[0]

    @property
    def modules(self) -> frozenset[str]:
        """Modules whose sources count: of target, registrar and an external row's options."""
        options = self.options if self.options and not self.is_ours else self.target
        return frozenset({self.module, options.partition(":")[0], self.registrar} - {None})

    @property
    def counted(self) -> str:
        """Text of the row for the fingerprint; sources and options are hashed separately."""
        return self.target

    @property
    def is_ours(self) -> bool:
        """True if the row belongs to this project."""
        return self.owner == THIS_PROJECT

    @property
    def source(self) -> str:
        """Owner to name in an error line."""
        return f"{self.target} ({self.owner})" if self.owner == RUN_TIME_OWNER else self.owner

    def collides_with(self, other: "Row") -> bool:
        """True if both claim a name, vendor and device; one of ours without devices claims all."""
        if (self.name, self.vendor) != (other.name, other.vendor):
            return False
        if not (self.devices and other.devices):
            return self.is_ours or other.is_ours or self.devices == other.devices
        return not {*self.devices}.isdisjoint(other.devices)


@dataclass(frozen=True)
class BrokenModule:
    """A listed module that cannot be imported, with a one-line reason and who lists it."""

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
"""A failed import is not retried, because it may have had partial effects."""
_importing: list[tuple[str, str]] = []
"""Stack of (module, owner of its rows) of the imports in progress."""


def register_row(kind: str, row: Row) -> None:
    """Register a row in this process; its owner and registrar are filled in.

    Registering the same row again has no effect. A duplicate name is refused only at lookup.

    Raises:
        ConfigError: the target is not ``module:attribute``, a row of another kind than `backend`
            has devices, or a vendor is given without devices.
    """
    path = f"plugin {kind}.{row.name}"
    module, _, attribute = row.target.partition(":")
    for is_wrong, problem in (
        (not (module and attribute), f"got target {row.target!r}; need module:attribute"),
        (row.devices and kind != "backend", "got devices; only a backend has them; remove them"),
        (
            row.vendor is not None and not row.devices,
            f"got vendor {row.vendor!r} without devices; name its devices",
        ),
    ):
        if is_wrong:
            raise ConfigError(path, problem)
    registrar, owner = _importing[-1] if _importing else (None, RUN_TIME_OWNER)
    devices = tuple(sorted(set(row.devices)))
    known = replace(row, devices=devices, owner=owner, registrar=registrar)
    if (kind, known) not in _registered:
        _registered.append((kind, known))


def outside_rows() -> tuple[tuple[str, Row], ...]:
    """Return every external row with its kind.

    First those of entry points by kind and name, then registered rows in order.
    """
    import_external_modules()
    announced: list[tuple[str, Row]] = []
    for entry in _entries():
        kind, _, name = entry.name.partition(".")
        if kind != MODULE_KIND:
            announced.append((kind, Row(name=name, target=entry.value, owner=_owner(entry))))
    new = (
        (kind, row)
        for kind, row in _registered
        if not any(
            kind == other_kind and row.collides_with(o) and row.target == o.target
            for other_kind, o in announced
        )
    )
    return (*announced, *new)


def external_modules() -> dict[str, str]:
    """Return the modules to import for the rows they register, in order, with who lists each."""
    names = (name.strip() for name in (env.RLHF_USE_EXTERNAL_MODULES.get() or "").split(","))
    listed = {name: f"environment.{env.RLHF_USE_EXTERNAL_MODULES.name}" for name in names if name}
    installed = (each for each in _entries() if each.name.partition(".")[0] == MODULE_KIND)
    return {**listed, **{entry.value: _owner(entry) for entry in installed}}


def import_external_modules() -> tuple[BrokenModule, ...]:
    """Import the `external_modules`, and return those that fail.

    The control plane imports them too, so they must not import torch. Jobs and ranks call this
    first, so that a module can patch a library before it is used; the caller must report failed
    modules.
    """
    modules = external_modules()
    for name, owner in ((n, owner) for n, owner in modules.items() if n not in _broken):
        _importing.append((name, RUN_TIME_OWNER if owner.startswith("environment.") else owner))
        try:
            with _outside_code():
                importlib.import_module(name)
        except ImportError as error:
            _broken[name] = BrokenModule(name, redact(str(error)), owner)
        finally:
            _importing.pop()
    return tuple(_broken[name] for name in modules if name in _broken)


def load_target(target: str) -> Any:
    """Import the module of a ``module:attribute`` target and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_row(row: Row, path: str) -> Any:
    """Import and return the object that a row's `target` names.

    Raises:
        ConfigError: an external plugin fails to import or lacks the attribute, or a library of this
            project's plugin is missing or broken. The error line starts with `path`.
    """
    if row.is_ours and not row.requires:
        return load_target(row.target)
    try:
        with _outside_code(converts=not row.is_ours):
            return load_target(row.target)
    except ImportError as error:
        reason, remedy = str(error), f"repair or remove {row.source}"
        if row.is_ours:
            extra = f"pip install 'rlhf-pipeline[{row.extra}]'"
            reason, remedy = reason_of(error), extra if row.extra else "install it again"
        raise ConfigError(
            path, f"{row.name} cannot be loaded from {row.target} ({reason}); {remedy}"
        ) from error


@contextmanager
def _outside_code(*, converts: bool = True) -> Iterator[None]:
    """Turn errors of an import into a one-line ImportError; only a `sys.exit` if not `converts`."""
    try:
        yield
    except SystemExit as error:
        if error.code == EXIT_TERMINATED:
            raise  # not from the module: this process received SIGTERM
        raise ImportError(f"it calls sys.exit({error.code!r})") from error
    except Exception as error:  # plugin boundary: any reason is the user's answer
        if not converts:
            raise
        raise ImportError(reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """Format an exception as one line: its type and text."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _entries() -> list[EntryPoint]:
    places = tuple((place, _changed_at(place)) for place in sys.path)
    found = {(e.name, _owner(e), e.value): e for e in _found_by(entry_points, places)}
    return [found[key] for key in sorted(found)]  # discovery order depends on the machine


def _changed_at(place: str) -> int:
    try:
        return os.stat(place).st_mtime_ns
    except OSError:
        return 0


@cache
def _found_by(
    scan: Callable[..., Iterable[EntryPoint]],
    places: tuple[tuple[str, int], ...],  # noqa: ARG001  cache key: sys.path and mtimes
) -> tuple[EntryPoint, ...]:
    """Scan, cached, because this opens the metadata of every distribution (0.2 s)."""
    return tuple(scan(group=ENTRY_POINT_GROUP))


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name}=={entry.dist.version}" if entry.dist else entry.value


RowT = TypeVar("RowT", bound=Row)


class PluginTable(Generic[RowT]):
    """The plugins of one kind, which is written as in entry points (`loss_mode`).

    A name has one row, or one for each device and vendor that it supports (`Row.devices`). The part
    of a name after a dot is a form of the plugin (`mine.value_model`). The argument `path` of the
    methods is the configuration field that holds the name, for error lines; None means `setting`.

    Args:
        row_type: row class of the table; external rows without its extra fields get the defaults.
        other_forms: what the field accepts besides names, for error lines.
    """

    def __init__(
        self,
        kind: str,
        setting: str,
        rows: Sequence[RowT],
        row_type: type[RowT],
        other_forms: tuple[str, ...] = (),
    ) -> None:
        self.kind = kind
        self.setting = setting
        self.rows = tuple(rows)
        self.row_type = row_type
        self._other_forms = other_forms

    def outside(self) -> tuple[RowT, ...]:
        """Return the rows of external plugins."""
        return tuple(self._typed(row) for kind, row in outside_rows() if kind == self.kind)

    def names(self, form: str = "") -> list[str]:
        """Return the sorted names with `form` after the dot; empty: names without a dot."""
        rows = (*self.rows, *self.outside())
        return sorted({row.name for row in rows if row.name.partition(".")[2] == form})

    def find_all(self, name: str, path: str | None = None) -> tuple[RowT, ...]:
        """Return the rows of a name, this project's first.

        Raises:
            ConfigError: two rows claim the name, or none does (UnknownPluginError).
        """
        path = path or self.setting
        rows = tuple(row for row in (*self.rows, *self.outside()) if row.name == name)
        if not rows:
            known = [*self.names(name.partition(".")[2]), *self._other_forms]
            broken = "".join(f"; {module}" for module in import_external_modules())
            raise UnknownPluginError(path, unknown_name(name, known) + broken)
        for first, second in combinations(rows, 2):
            if first.collides_with(second):
                raise ConfigError(
                    path,
                    f"{name!r} is registered by both {first.source} and {second.source}; "
                    "remove one",
                )
        return rows

    def place(  # fmt: skip
        self,
        name: str,
        path: str | None = None,
        *,
        device: str | None = None,
        vendor: str | None = None,
    ) -> RowT:
        """Return the row of a name without checking or importing what it requires.

        A row for the device and vendor has priority over a row for the device, and this over a row
        for any device. Without `device` the first row is returned.

        Raises:
            UnknownPluginError: the name is unknown, or does not support the device.
            ConfigError: two rows claim the name.
        """
        rows = self.find_all(name, path)
        if device is None:
            return rows[0]
        fitting = [r for r in rows if not r.devices or device in r.devices]
        fitting = [r for r in fitting if not r.devices or r.vendor in {vendor, None}]
        if not fitting:
            places = {f"{d} ({r.vendor})" if r.vendor else d for r in rows for d in r.devices}
            raise UnknownPluginError(
                path or self.setting,
                f"{name} does not run on {device} ({vendor}); it runs on: "
                f"{', '.join(sorted(places))}",
            )
        return min(fitting, key=lambda row: (not row.devices, row.vendor != vendor))

    def find(  # fmt: skip
        self,
        name: str,
        path: str | None = None,
        *,
        device: str | None = None,
        vendor: str | None = None,
    ) -> RowT:
        """Return the row of `place`; raises ConfigError if its requirements are missing."""
        row = self.place(name, path, device=device, vendor=vendor)
        _interpreter(row, path or self.setting)
        return row

    def load(  # fmt: skip
        self,
        name: str,
        path: str | None = None,
        *,
        device: str | None = None,
        vendor: str | None = None,
    ) -> Any:
        """Import the object that the row's target names; arguments and errors as for `find`."""
        return load_row(self.find(name, path, device=device, vendor=vendor), path or self.setting)

    def check_targets(self, name: str, path: str | None = None) -> None:
        """Check that an external plugin's module and attribute exist, without importing the module.

        Raises ConfigError if not. Plugins that run in a job environment are not checked.
        """
        for row in self.find_all(name, path):
            if not (row.is_ours or row.environment) and (problem := _absent(row.target)):
                raise ConfigError(
                    path or self.setting,
                    f"{name} cannot be found: {problem}; repair or remove {row.source}",
                )

    def interpreter(self, name: str, path: str | None = None) -> Path | None:
        """Return the path of the Python that a plugin needs; None: this one. Raises as `find`."""
        return _interpreter(self.place(name, path), path or self.setting)

    def _typed(self, row: Row) -> RowT:
        if isinstance(row, self.row_type):
            return row
        return self.row_type(**{each.name: getattr(row, each.name) for each in fields(Row)})


def _absent(target: str) -> str | None:
    module, _, attribute = target.partition(":")
    spec = _spec_of(module)
    if spec is None:
        return f"no module {module}"
    # A text search: an attribute can be defined in many ways, but its name appears in the file.
    defined = rf"\b{re.escape(attribute.partition('.')[0])}\b|\bimport \*|\b__getattr__\b"
    file = Path(spec.origin or "")
    if file.suffix != ".py" or re.search(defined, file.read_text("utf-8", "replace")):
        return None
    return f"{file} does not define {attribute!r}"


def _spec_of(module: str) -> ModuleSpec | None:
    """Return a module's spec; unlike `importlib.util.find_spec` it imports no parent package."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for part in rest:
        places = spec.submodule_search_locations or [] if spec else []
        spec = spec and PathFinder.find_spec(f"{spec.name}.{part}", places)
    return spec


_assumes_installed = ContextVar("assumes_installed", default=False)


@contextmanager
def assumed_installed() -> Iterator[None]:
    """Scope in which what plugins require counts as installed, to plan for another machine."""
    token = _assumes_installed.set(True)
    try:
        yield
    finally:
        _assumes_installed.reset(token)


def _interpreter(row: Row, path: str) -> Path | None:
    if row.requires is None or _assumes_installed.get() or _installed(row.requires):
        return None
    if row.environment is not None:
        if interpreter := interpreter_of(row.environment):
            return interpreter
        name = row.environment
        raise ConfigError(path, f"{row.name} needs the job environment {name}: make env-{name}")
    remedy = f"the extra: pip install 'rlhf-pipeline[{row.extra}]' " if row.extra else "a library "
    raise ConfigError(path, f"{row.name} needs {remedy}(no module named {row.requires})")


@cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
