"""Registry of the plugins of one kind: this project's rows and those of external packages.

Promises: `names` and `find` import no plugin; errors have the same wording for every kind.
Does not promise: that a plugin or its libraries can be imported; `load` shows that.
To add a plugin: write one file and one row in the table of its kind (`engines.config.plugins`,
`hardware.platforms`), or register it externally as `infra.plugins` describes.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, TypeVar

from infra.errors import ConfigError, UnknownPluginError
from infra.job_environments import interpreter_of
from infra.plugins import Row, load_row, outside_plugins, unknown_plugin

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
        return tuple(self._typed(row) for row in outside_plugins(self.kind))

    def names(self, form: str = "") -> list[str]:
        """Return the sorted names of one form."""
        every = (row.name for row in (*self.rows, *self.outside()))
        return sorted({name for name in every if name.partition(".")[2] == form})

    def find_all(self, name: str, path: str | None = None) -> tuple[RowT, ...]:
        """Return the rows of a name, this project's first.

        Raises:
            ConfigError: two rows claim the name, or none does (UnknownPluginError).
        """
        path = path or self.setting
        rows = tuple(row for row in (*self.rows, *self.outside()) if row.name == name)
        if not rows:
            known = [*self.names(name.partition(".")[2]), *self._other_forms]
            raise UnknownPluginError(path, unknown_plugin(name, known))
        for first, second in combinations(rows, 2):
            if first.collides_with(second):
                both = f"{first.source} and {second.source}"
                raise ConfigError(path, f"{name!r} is registered by both {both}; remove one")
        return rows

    def place(
        self,
        name: str,
        path: str | None = None,
        *,
        device: str | None = None,
        vendor: str | None = None,
    ) -> RowT:
        """Return the row of a name without checking or importing what it requires.

        A row for (device, vendor) is preferred to one for the torch device type, and that to one
        for any. Without `device` the first row is returned.

        Raises:
            UnknownPluginError: the name is unknown, or does not support the device.
            ConfigError: two rows claim the name.
        """
        rows = self.find_all(name, path)
        row = _best(rows, device, vendor)
        if row is None:
            on = ", ".join(sorted(place for row in rows for place in _places(row)))
            problem = f"{name} does not run on {device} ({vendor}); it runs on: {on}"
            raise UnknownPluginError(path or self.setting, problem)
        return row

    def find(
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

    def load(
        self,
        name: str,
        path: str | None = None,
        *,
        device: str | None = None,
        vendor: str | None = None,
    ) -> Any:
        """Import the object that the row's target names. Arguments and errors as of `find`."""
        row = self.find(name, path, device=device, vendor=vendor)
        return load_row(row, path or self.setting)

    def check_targets(self, name: str, path: str | None = None) -> None:
        """Check that module and attribute of an external plugin exist; imports nothing.

        Raises ConfigError if not. Plugins that run in a job environment are not checked.
        """
        for row in self.find_all(name, path):
            if not (row.is_ours or row.environment) and (problem := _absent(row.target)):
                raise ConfigError(
                    path or self.setting,
                    f"{name} cannot be found: {problem}; repair or remove {row.source}",
                )

    def interpreter(self, name: str, path: str | None = None) -> Path | None:
        """Return the Python that jobs need for a plugin; None: this one. Errors as of `find`."""
        return _interpreter(self.find(name, path), path or self.setting)

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
        if spec is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or [])
    return spec


def _best(rows: Sequence[RowT], device: str | None, vendor: str | None) -> RowT | None:
    if device is None:
        return rows[0]
    on_device = [row for row in rows if device in row.devices]
    exact = [row for row in on_device if row.vendor == vendor]
    every = [row for row in on_device if row.vendor is None]
    anywhere = [row for row in rows if not row.devices]
    return next(iter((*exact, *every, *anywhere)), None)


def _places(row: Row) -> Iterator[str]:
    for device in row.devices:
        yield f"{device} ({row.vendor})" if row.vendor else device


def _interpreter(row: Row, path: str) -> Path | None:
    if row.requires is None or _installed(row.requires):
        return None
    if row.environment is not None:
        interpreter = interpreter_of(row.environment)
        if interpreter is None:
            name = row.environment
            raise ConfigError(path, f"{row.name} needs the job environment {name}: make env-{name}")
        return interpreter
    remedy = f"the extra: pip install 'rlhf-pipeline[{row.extra}]' " if row.extra else "a library "
    raise ConfigError(path, f"{row.name} needs {remedy}(no module named {row.requires})")


@cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
