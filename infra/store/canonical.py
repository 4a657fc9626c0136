"""One JSON text per value, so that equal values have equal digests on every machine.

Promises: `canonical_json` sorts keys, writes ASCII without white space, and refuses everything
whose text would depend on the Python version, a library or the order of insertion: sets,
non-string keys, NaN, infinities and unknown objects.
Does not promise that 1 and 1.0 are equal: a schema decides what a number is before it gets here.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel


def canonical_json(obj: Any) -> bytes:
    """The one JSON text of a value.

    Args:
        obj: made of pydantic models, mappings, lists, tuples, numbers, strings, booleans, None.

    Returns:
        ASCII bytes, without a line end.

    Raises:
        TypeError: a value or key has no canonical form; names where it stands.
        ValueError: a number is NaN or infinite; names where it stands.
    """
    plain = _plain(obj, "$")
    return json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def sha256_json(obj: Any) -> str:
    """sha256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, 64 hex digits; reads in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(obj: Any, where: str) -> Any:
    """`obj` as dict, list, str, int, float, bool and None only."""
    if isinstance(obj, BaseModel):
        obj = obj.model_dump(mode="json")
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise ValueError(f"{where}: {obj} has no JSON form")
        return obj
    if isinstance(obj, Mapping):
        for key in obj:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a string")
        return {key: _plain(value, f"{where}.{key}") for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_plain(value, f"{where}[{i}]") for i, value in enumerate(obj)]
    raise TypeError(f"{where}: {type(obj).__name__} has no canonical JSON form")
