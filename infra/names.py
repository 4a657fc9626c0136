"""What to say about a name that nobody registered."""

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.5
"""Below this `difflib` ratio a known name is no suggestion."""


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Text of the error about an unknown name: what exists, and the nearest name.

    Args:
        name: what the user wrote.
        known: names that would work, in the order to show them.

    Returns:
        The problem part of the error line.
    """
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"no {name!r}; known: {', '.join(names) or 'none'}{hint}"
