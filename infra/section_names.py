"""Renames the configuration section in errors of shared validation code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from infra.errors import ConfigError


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
