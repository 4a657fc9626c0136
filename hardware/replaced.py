"""Temporarily replace attributes of a library that expects another device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Scope in which some attributes of a module or object have other values."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
