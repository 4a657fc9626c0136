"""Error text for unknown names."""

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.5
"""Smallest `difflib` ratio at which a known name is suggested."""


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return an error text that lists the known names in order and suggests the nearest one."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"no {name!r}; known: {', '.join(names) or 'none'}{hint}"
