"""Errors about a section of a recipe, told of another that has the same fields."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from infra.errors import ConfigError


@contextmanager
def renamed_sections(actual: Mapping[str, str]) -> Iterator[None]:
    """Scope in which errors name the section that the user wrote.

    Args:
        actual: by a section as rules call it (`rl.reward`), the one that it stands for here
            (`suites.gsm8k.reward`). Of those that fit a path, the longest counts.

    Yields:
        None: nothing.

    Raises:
        ConfigError: what was raised inside, with the other name.
    """
    try:
        yield
    except ConfigError as error:
        for section in sorted(actual, key=len, reverse=True):
            rest = error.path.removeprefix(section)
            if error.path.startswith(section) and rest[:1] in {"", "."}:
                raise type(error)(f"{actual[section]}{rest}", error.problem) from None
        raise
