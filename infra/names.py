"""Names of settings: unknown ones and the user's own in error texts, and dotted paths."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from infra.errors import ConfigError

MIN_SIMILARITY = 0.5
"""Smallest `difflib` ratio at which a known name is suggested."""


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return an error text that lists the known names in order and suggests the nearest one."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"no {name!r}; known: {', '.join(names) or 'none'}{hint}"


@contextmanager
def renamed_sections(actual: Mapping[str, str]) -> Iterator[None]:
    """Context manager in which a `ConfigError` names the section that the user wrote.

    `actual` maps a section as the validation code calls it (`rl.reward`) to the user's section
    (`suites.gsm8k.reward`). The longest matching section is used.
    """
    try:
        yield
    except ConfigError as error:
        for section in sorted(actual, key=len, reverse=True):
            rest = error.path.removeprefix(section)
            if error.path.startswith(section) and rest[:1] in {"", "."}:
                raise type(error)(f"{actual[section]}{rest}", error.problem) from None
        raise


def flattened(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one with dotted paths; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{path}{name}.") if nested else {f"{path}{name}": value}
    return flat
