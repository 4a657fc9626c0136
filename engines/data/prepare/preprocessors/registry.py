"""The preprocessors by the name that `data.*.format` gives them.

Promises: an unknown name lists those that exist; a name registered twice is an error. The imports
are static, so that editing a preprocessor re-runs the stage that used it.
"""

from typing import Any

from pydantic import ValidationError

from engines.config.data import SourceConfig
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.prepare.preprocessors.columns import Columns
from engines.data.prepare.preprocessors.dapo_math_17k import DAPOMath17k
from engines.data.prepare.preprocessors.gsm8k import GSM8K
from engines.data.prepare.preprocessors.math import MATH
from engines.data.prepare.preprocessors.row_schema import Conversations, RowSchema
from engines.errors import UnknownPluginError
from infra.errors import ConfigError
from infra.names import unknown_name

_preprocessors: dict[str, type[Preprocessor[Any]]] = {}


def register(name: str, preprocessor: type[Preprocessor[Any]]) -> None:
    """Make a preprocessor known.

    Args:
        name: the value of `data.*.format`.
        preprocessor: its class.

    Raises:
        ConfigError: the name belongs to another class.
    """
    holder = _preprocessors.setdefault(name, preprocessor)
    if holder is not preprocessor:
        raise ConfigError(
            f"preprocessor {name!r}",
            f"registered by both {holder.__module__} and {preprocessor.__module__}; remove one",
        )


def names() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(_preprocessors))


def create_preprocessor(source: SourceConfig, field: str) -> Preprocessor[Any]:
    """The preprocessor of a source, with its options validated.

    Args:
        source: its `format` and `options`.
        field: the source's place in the configuration, for errors (`data.rl.0`).

    Returns:
        Ready to read rows.

    Raises:
        UnknownPluginError: no preprocessor has that name.
        ConfigError: the options are not its options.
    """
    preprocessor = _preprocessors.get(source.format)
    if preprocessor is None:
        raise UnknownPluginError(f"{field}.format", unknown_name(source.format, names()))
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


register("rows", RowSchema)
register("messages", Conversations)
register("columns", Columns)
register("gsm8k", GSM8K)
register("math", MATH)
register("dapo_math_17k", DAPOMath17k)
