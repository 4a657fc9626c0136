"""A weight source as JSON, for a receiver that runs in another process.

Promises: only frozen dataclasses of `engines.weight_sync` are accepted, so a message cannot make
the receiver import or build anything else.
"""

import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from engines.errors import WeightSyncError
from engines.weight_sync.base import WeightSource

_PACKAGE = "engines.weight_sync."
_SCALARS = (str, int, float, bool)


def source_to_json(source: WeightSource) -> dict[str, Any]:
    """Return a source for `json.dumps`; WeightSyncError unless its fields are paths and scalars."""
    kind = type(source)
    if not is_dataclass(source) or not kind.__module__.startswith(_PACKAGE):
        raise WeightSyncError(
            f"{kind.__module__}.{kind.__qualname__} cannot travel to another process; need a "
            f"frozen dataclass of {_PACKAGE[:-1]}"
        )
    values: dict[str, Any] = {}
    for each in fields(source):
        value = getattr(source, each.name)
        if not isinstance(value, (Path, *_SCALARS)):
            raise WeightSyncError(f"{kind.__qualname__}.{each.name}: got {value!r}; need a scalar")
        values[each.name] = str(value) if isinstance(value, Path) else value
    return {"module": kind.__module__, "name": kind.__qualname__, "fields": values}


def source_from_json(data: Mapping[str, Any]) -> WeightSource:
    """Read the result of `source_to_json`; WeightSyncError if its class or fields are unknown."""
    module, name, values = str(data["module"]), str(data["name"]), data["fields"]
    if not module.startswith(_PACKAGE):
        raise WeightSyncError(f"{module}.{name} is no weight source of this project")
    kind = getattr(importlib.import_module(module), name, None)
    if not isinstance(kind, type) or not is_dataclass(kind) or kind.__module__ != module:
        raise WeightSyncError(f"{module}.{name} is no weight source of this project")
    hints = get_type_hints(kind)
    if {each.name for each in fields(kind)} != values.keys():
        raise WeightSyncError(f"{module}.{name}: got fields {', '.join(sorted(values))}")
    made: Any = kind(**{n: Path(v) if hints[n] is Path else v for n, v in values.items()})
    return made
