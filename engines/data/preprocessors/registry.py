"""The preprocessors by the name that `data.*.format` gives them.

Promises: an unknown name lists those that exist; a name registered twice is an error; a target
is imported when it is first used.
"""

import difflib
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from engines.config.data import SourceConfig
from engines.data.preprocessors.base import Preprocessor
from engines.errors import UnknownPluginError
from infra.errors import ConfigError

_targets: dict[str, str] = {}


def register(name: str, target: str) -> None:
    """Make a preprocessor known.

    Args:
        name: the value of `data.*.format`.
        target: `module:Class`.

    Raises:
        ConfigError: the name belongs to another target.
    """
    if _targets.setdefault(name, target) != target:
        raise ConfigError(
            f"preprocessor {name!r}",
            f"registered by both {_targets[name]} and {target}; remove one",
        )


def names() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(_targets))


def create_preprocessor(source: SourceConfig, field: str) -> Preprocessor[Any]:
    """The preprocessor of a source, with its options validated.

    Args:
        source: its `format` and `options`.
        field: the source's place in the configuration, for errors (`data.rl.0`).

    Raises:
        UnknownPluginError: no preprocessor has that name.
        ConfigError: the options are not its options.
    """
    target = _targets.get(source.format)
    if target is None:
        nearest = difflib.get_close_matches(source.format, _targets, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise UnknownPluginError(
            f"{field}.format", f"no {source.format!r}; known: {', '.join(names())}{hint}"
        )
    module, _, class_name = target.partition(":")
    preprocessor: type[Preprocessor[Any]] = getattr(import_module(module), class_name)
    try:
        options = preprocessor.Options.model_validate(source.options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("options", *first["loc"]))
        known = ", ".join(preprocessor.Options.model_fields) or "none"
        raise ConfigError(
            f"{field}.{where}",
            f"got {first['input']!r}; {first['msg']}; options of {source.format}: {known}",
        ) from None
    return preprocessor(options)


register("rows", "engines.data.preprocessors.row_schema:RowSchema")
register("messages", "engines.data.preprocessors.row_schema:Conversations")
register("columns", "engines.data.preprocessors.columns:Columns")
register("gsm8k", "engines.data.preprocessors.gsm8k:GSM8K")
register("math", "engines.data.preprocessors.math:MATH")
register("dapo_math_17k", "engines.data.preprocessors.dapo_math_17k:DAPOMath17k")
