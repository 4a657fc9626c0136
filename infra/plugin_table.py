"""The parts of one kind by name: this project's rows and those that others add.

Promises: `names` and `find` import no part; a name that nobody has, that two claim, or whose
extra or job environment is missing is one `ConfigError` with one wording, whatever the kind.
Does not promise: that a part loads, or that a library it stands on works; `load` shows that.
To add a part: one file that holds it and one row in the table of its kind
(`engines.config.plugins`, `hardware.platforms`), or, from outside, what `infra.plugins` describes.
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
    """One kind.

    A name has one row, or one for each device and vendor it runs on (`Row.devices`). What follows
    a dot in a name is a form of the part (`mine.value_model`).

    Args:
        kind: as entry points write it (`loss_mode`).
        setting: what names a part in a recipe, for error lines.
        rows: this project's.
        row_type: of the rows; a row of others without its facts has their defaults.
        other_forms: what the setting takes beside names, for error lines.
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
        """Rows of other people."""
        return tuple(self._typed(row) for row in outside_plugins(self.kind))

    def names(self, form: str = "") -> list[str]:
        """Every name of a form, sorted."""
        every = (row.name for row in (*self.rows, *self.outside()))
        return sorted({name for name in every if name.partition(".")[2] == form})

    def find_all(self, name: str, path: str | None = None) -> tuple[RowT, ...]:
        """The rows of a name, one for each place it runs on.

        Args:
            name: what the configuration says.
            path: where it says so; None: the table's setting.

        Returns:
            This project's first.

        Raises:
            UnknownPluginError: nobody has it; names the nearest known one.
            ConfigError: two claim it.
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
        """The row of a name, whether or not what it requires is here; imports nothing.

        Args:
            name: what the configuration says.
            path: where it says so; None: the table's setting.
            device: torch device type it has to run on; None: any.
            vendor: of that device.

        Returns:
            The row for (device, vendor), else for the device, else for any device.

        Raises:
            UnknownPluginError: nobody has it, or not for that device; the text says what there is.
            ConfigError: two claim it.
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
        """The row of a name, if it can be used here; imports nothing.

        Args:
            name: what the configuration says.
            path: where it says so; None: the table's setting.
            device: as of `place`.
            vendor: as of `place`.

        Returns:
            The row.

        Raises:
            ConfigError: as of `place`, or its extra or its job environment is missing.
        """
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
        """Import a part: what the target of its row names. Arguments and errors as of `find`."""
        row = self.find(name, path, device=device, vendor=vendor)
        return load_row(row, path or self.setting)

    def check_targets(self, name: str, path: str | None = None) -> None:
        """Refuse a part of others that is not where its row says; imports nothing.

        Args:
            name: what the configuration says.
            path: where it says so; None: the table's setting.

        Raises:
            ConfigError: there is no such module, or the attribute's name is not in its file; or as
                of `find_all`. What runs in a job environment is not looked for here.
        """
        for row in self.find_all(name, path):
            if not (row.is_ours or row.environment) and (problem := _absent(row.target)):
                raise ConfigError(
                    path or self.setting,
                    f"{name} cannot be found: {problem}; repair or remove {row.source}",
                )

    def interpreter(self, name: str, path: str | None = None) -> Path | None:
        """The Python that jobs need for a part; None: this one. Arguments and errors of `find`."""
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
    # It may be defined in many ways, but hardly without its name.
    defined = rf"\b{re.escape(attribute.partition('.')[0])}\b|\bimport \*|\b__getattr__\b"
    file = Path(spec.origin or "")
    if file.suffix != ".py" or re.search(defined, file.read_text("utf-8", "replace")):
        return None
    return f"{file} does not define {attribute!r}"


def _spec_of(module: str) -> ModuleSpec | None:
    """Of a module; unlike `importlib.util.find_spec` it imports no package on the way."""
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
    """The Python with what a row requires; None: this one, or an error that says what to make."""
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
    """Whether a top-level module of another distribution can be found; imports nothing."""
    return importlib.util.find_spec(module) is not None
